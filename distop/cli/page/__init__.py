"""An operation as one HTML page for people: what is shown (``content``, pure), and as text in a file
(``page_file``)."""
