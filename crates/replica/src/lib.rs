//! The stream from primary to spare and its acknowledgements.
#![forbid(unsafe_code)]
