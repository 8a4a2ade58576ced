//! Who is primary: terms, leases, heartbeats and failover as a pure state machine.
//!
//! [`Node::step`] takes the time and one event and answers with actions. There is no clock, socket
//! or thread in here: the agent feeds events in and carries actions out, and a test can run
//! thousands of clusters a second.
#![forbid(unsafe_code)]

mod event;
#[cfg(feature = "mutate")]
pub mod mutate;
#[cfg(not(feature = "mutate"))]
mod mutate;
mod node;
pub mod register;

pub use event::{
    Action, Beat, BeatRole, CannotTakeOver, Claim, Closed, DropCause, Event, FenceCause, Member,
    Nanos, Quorum, SuspectCause, granted_by_nobody,
};
pub use node::{Config, Node, RANKS_MAX, Role, Status};
