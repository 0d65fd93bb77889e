"""Methods that score parts or search for circuits."""
