//! The one door: `cargo xtask …`.
fn main() {}
