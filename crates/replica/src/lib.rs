//! The stream from primary to spare and its acknowledgements.
//!
//! Frames ([`frame`]) over a channel (plain TCP or mutual TLS), greeting first, then checkpoints in
//! one direction and acknowledgements in the other. Nothing here starts a thread: the agent gives
//! each loop one.
#![forbid(unsafe_code)]

pub mod bases;
pub mod frame;
pub mod message;
pub mod pages;
