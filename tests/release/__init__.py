"""What a release needs: `make release-check` builds it in a temporary folder and looks at it."""
