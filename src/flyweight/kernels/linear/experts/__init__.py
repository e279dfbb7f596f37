"""The experts of a layer as one linear: routing, few tokens, many tokens, and the sum."""
