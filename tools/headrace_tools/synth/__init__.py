"""headrace-synth: containers of any geometry with random weights, for measuring speed."""
