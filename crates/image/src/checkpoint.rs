//! The checkpoint as a whole.

use minicbor::{Decode, Encode};

use crate::ids::{Position, Term};
use crate::memory::{AddressSpace, SharedMemory};
use crate::objects::OpenFile;
use crate::tree::{ClockReading, Process};

/// Everything of a guest at one instant, except page bytes and file changes, which travel beside
/// it in the same epoch.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Checkpoint {
    /// The epoch it ends.
    #[n(0)]
    pub position: Position,
    /// Reign of the primary that took it.
    #[n(1)]
    pub term: Term,
    /// Clocks of the guest.
    #[n(2)]
    pub clocks: ClockReading,
    /// Host and domain name (uts namespace).
    #[n(3)]
    pub names: (String, String),
    /// Processes; parents before their children.
    #[n(4)]
    pub processes: Vec<Process>,
    /// Address spaces.
    #[n(5)]
    pub spaces: Vec<AddressSpace>,
    /// Open file descriptions.
    #[n(6)]
    pub files: Vec<OpenFile>,
    /// Shared memory objects.
    #[n(7)]
    pub shared: Vec<SharedMemory>,
    /// System V semaphores and message queues, POSIX message queues.
    #[n(8)]
    pub ipc: crate::ipc::Ipc,
    /// Last pid the guest's namespace gave out (`/proc/sys/kernel/ns_last_pid`).
    #[n(9)]
    pub last_pid: i32,
}

/// Why bytes are not a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// the checkpoint's bytes cannot be read: {0}
    #[error("the checkpoint's bytes cannot be read: {0}")]
    Malformed(String),
    /// the checkpoint contradicts itself: {0}
    #[error("the checkpoint contradicts itself: {0}")]
    Inconsistent(String),
}

impl Checkpoint {
    /// Its CBOR bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        match minicbor::to_vec(self) {
            Ok(bytes) => bytes,
            Err(never) => unreachable!("writing to memory cannot fail: {never}"),
        }
    }

    /// Reads what [`Checkpoint::to_bytes`] wrote. Never panics on foreign bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ImageError> {
        minicbor::decode(bytes).map_err(|error| ImageError::Malformed(error.to_string()))
    }
}
