"""Ready-made models: small ones that the package trains itself, and language models by name."""

from sparse_tl.zoo.building import (
    Recipe as Recipe,
    build_pair as build_pair,
    read_pair as read_pair,
)
from sparse_tl.zoo.built_in import (
    TASKS as TASKS,
    addition_recipe as addition_recipe,
    build_addition_model as build_addition_model,
    load_addition_models as load_addition_models,
    load_task_models as load_task_models,
    task_accuracy as task_accuracy,
    task_pairs as task_pairs,
    task_recipe as task_recipe,
    task_rows as task_rows,
    task_tokenizer as task_tokenizer,
)
from sparse_tl.zoo.examples import load_examples as load_examples
from sparse_tl.zoo.language import (
    PUBLISHED as PUBLISHED,
    SMOLLM2 as SMOLLM2,
    cached_file as cached_file,
    get_language_model as get_language_model,
    is_whole as is_whole,
    load_language_model as load_language_model,
    load_language_models as load_language_models,
    load_named_model as load_named_model,
    published as published,
)
