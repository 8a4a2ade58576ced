//! Address takeover, and in time the output gate and the proxy.
#![forbid(unsafe_code)]

pub mod announce;
pub mod callers;
pub mod go_live;
pub mod hook;
pub mod takeover;
