"""A widget whose figure is saved with the notebook, and shown when there is no kernel."""

from __future__ import annotations

from typing import Any

from sparse_tl.explorer.channel import Channel

_NO_LIVE_VIEW = (  # hides JupyterLab's "model not found"
    ".jp-OutputArea-child:has([data-saved-explorer]) + "
    ".jp-OutputArea-child:not(:has(.sparse-tl-explorer)) { display: none; }"
)


class SavedWidget(Channel):
    """A widget whose output includes self-contained HTML, which the live widget hides."""

    _saved: Any = None

    def _saved_html(self) -> str:
        """The figure to save, as HTML."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # Two outputs, since a front end shows only one format of each.
        self._saved = display(self._saved_bundle(), raw=True, display_id=self._saved_id)
        display(self._repr_mimebundle_()[0], raw=True)  # type: ignore[index]

    def update_saved(self) -> None:
        """Update the figure that is saved with the notebook."""
        if self._saved is not None:
            self._saved.update(self._saved_bundle(), raw=True)

    def _saved_bundle(self) -> dict[str, str]:
        start = f'<div data-saved-explorer="{self._saved_id}">\n<style>{_NO_LIVE_VIEW}</style>'
        return {"text/html": f"{start}\n{self._saved_html()}\n</div>", "text/plain": repr(self)}
