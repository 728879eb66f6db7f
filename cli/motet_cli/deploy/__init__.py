"""Write the files that deploy a stack on several machines, from compose.yaml: `motet deploy`."""
