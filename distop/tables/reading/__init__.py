"""How files of tables are read: footers and manifests in Python, rows in Spark. The parts that readers are made of."""
