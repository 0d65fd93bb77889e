"""The adapters of TransformerBridge and HookedTransformer."""
