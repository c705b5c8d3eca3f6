"""An operation as one HTML page: its content (``content``, pure), and its HTML in a file (``page_file``)."""
