"""Plan what machines a model or a traffic needs: `motet plan`."""
