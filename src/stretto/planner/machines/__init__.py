"""What jobs run on: devices, links, clusters, and the catalogue of known ones."""
