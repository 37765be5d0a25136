"""One module per operator family; importing a module declares its operators (see `registry.py`)."""
