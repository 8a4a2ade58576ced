//! The `hotspare` program.
#![forbid(unsafe_code)]
fn main() {}
