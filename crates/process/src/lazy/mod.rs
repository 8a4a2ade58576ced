//! A restart that does not wait for its memory, after FREM (Li and Lan, "A Fast Restart Mechanism
//! for Checkpoint/Recovery Protocols in Networked Environments").
//!
//! ```text
//!  checkpoint ──▶ layout ──▶ what cannot come late ──▶ may start ──▶ finalise ──▶ runs
//!                    │                                    ▲
//!                  Loader: the touch set, in the order of first touch; the rest
//!                          what the guest waits for, ahead of it
//! ```
//!
//! Private anonymous memory comes late; everything else is there before the guest runs: shared
//! memory can be read by means that no page fault sees (read(2) of a memfd), and what a program
//! has written over its files is little.

mod head;
mod loader;
mod pending;
mod plan;
mod sources;
mod space;

pub use loader::{LoadFailure, Loaded, Loader, LoaderProgress};
pub(crate) use space::LazySpace;

pub use crate::ghost::needed_at_once;
pub use plan::{Due, EARLY_BYTES, Plan, Start, Window};
pub use sources::Sources;
