//! What a checkpoint is: its types, its bytes, its checks. No files, no sockets.
#![forbid(unsafe_code)]

mod macros;

pub mod bytes;
pub mod checkpoint;
pub mod files;
pub mod ids;
pub mod ipc;
pub mod memory;
pub mod objects;
pub mod sockets;
pub mod source;
pub mod touch;
pub mod tree;

pub use bytes::SharedBytes;
pub use checkpoint::{Checkpoint, ImageError};
pub use ids::{Epoch, EventIndex, NodeId, Position, Term};
