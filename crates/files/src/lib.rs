//! Replicated directories: every change of a guest file, in order, as part of the checkpoint.
//!
//! ```text
//! guest ──FUSE──▶ server ──▶ store (backing directory + tree of names)
//!                    └─────▶ log ──cut──▶ ChangeSet ══stream══▶ apply ──▶ store of the spare
//!                 initial_copy ─────────▶ chunks ═════stream══▶ copy_chunk ──┘
//! ```
#![forbid(unsafe_code)]

mod apply;
mod change_set;
mod error;
mod extents;
mod flusher;
mod identity;
mod initial_copy;
mod log;
mod mount;
mod replicated;
mod server;
mod shared;
mod store;
mod tree;

pub use change_set::ChangeSet;
pub use error::FilesError;
pub use identity::{Difference, Identities, Mismatch, list_files};
pub use initial_copy::InitialCopy;
pub use log::LogLimits;
pub use replicated::{ReplicatedDir, Role};
