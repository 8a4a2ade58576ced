//! Marks: what the kernel notes of threads, processes and sockets, as raw bytes.
//!
//! Nearly all that a checkpoint says of a guest is what the checkpoint before said. To find that
//! out by asking takes a hundred system calls, and some things only a thread itself can be asked.
//! A BPF iterator over the threads or the files of a process (Linux 6.1) copies the fields behind
//! those calls instead. Nobody interprets them: where all bytes are as they were, so is what they
//! stand for. Values are compared, and not only addresses, which may be used again.
//!
//! The fields are found by their names in the kernel's own description of its types. A kernel that
//! lacks one of them, or does not let us look, has no marks, and is asked as ever.

mod sockets;
mod threads;
mod writer;

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::bpf;
use crate::btf::Btf;
use crate::error::{KernelError, Result};

pub use sockets::{SocketIdentity, SocketMark, SocketMarks, WatchedSockets};
pub use threads::{Seen, ThreadMark, ThreadMarks, WatchedThreads};

/// The programs, loaded.
#[derive(Debug)]
pub struct Marks {
    /// Of threads and processes.
    pub threads: ThreadMarks,
    /// Of TCP sockets.
    pub sockets: Result<SocketMarks>,
}

static LOADED: OnceLock<Option<Marks>> = OnceLock::new();

impl Marks {
    /// Loads the programs, once. That takes tens of milliseconds.
    pub fn load() -> Result<&'static Self> {
        let mut failed = None;
        let loaded = LOADED.get_or_init(|| match Self::open() {
            Ok(marks) => Some(marks),
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        loaded.as_ref().ok_or_else(|| failed.unwrap_or_else(|| unknown(None)))
    }

    /// The programs, if they were loaded.
    pub fn loaded() -> Option<&'static Self> {
        LOADED.get()?.as_ref()
    }

    fn open() -> Result<Self> {
        let btf = Btf::of_kernel()?;
        let threads = ThreadMarks::open(&btf)?;
        Ok(Self { threads, sockets: SocketMarks::open(&btf) })
    }
}

/// What the programs look at is not there, or goes by another name.
fn unknown(missing: Option<String>) -> KernelError {
    let missing = missing.unwrap_or_else(|| "iterators over tasks".into());
    KernelError::Unexpected(format!("a kernel without {missing}"))
}

/// Runs an iterator to its end; `turn` is for the one buffer that its program has.
fn read(link: &OwnedFd, turn: &Mutex<()>, text: &mut Vec<u8>) -> Result<()> {
    text.clear();
    let mut records = File::from(bpf::iterator(link)?);
    let turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    records.read_to_end(text).map_err(KernelError::io("read marks of a process"))?;
    drop(turn);
    Ok(())
}
