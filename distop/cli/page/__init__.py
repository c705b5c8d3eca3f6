"""An operation as one HTML page for people: what is shown (``model``, pure), as text (``render``), into a file."""
