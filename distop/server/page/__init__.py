"""The page of the service: views in a browser, over the same calls as REST, with the same permissions."""
