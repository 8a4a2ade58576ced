//! Replicated directories: every change of a guest file, in order, as part of the checkpoint.
#![forbid(unsafe_code)]
