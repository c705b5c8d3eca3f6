"""How files of tables are read, whatever their format. The parts that readers are made of."""
