"""The life of a request from admission to its last token: records, states, admission, dispatch. Knows no HTTP."""
