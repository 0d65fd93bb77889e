"""What public calls share: checks of arguments, scopes, and errors that name the remedy."""
