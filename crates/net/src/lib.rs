//! Address takeover, the output gate, and in time the proxy.
#![forbid(unsafe_code)]

pub mod announce;
pub mod callers;
mod company;
pub mod fuzz;
pub mod gate;
pub mod go_live;
pub mod handshakes;
pub mod hook;
pub mod lease;
pub mod probe;
pub mod relay;
pub mod takeover;

/// Output leaves before its checkpoint is committed: a build that tests use to see whether they
/// would notice.
pub const BROKEN_GATE: bool = cfg!(feature = "broken-gate");
