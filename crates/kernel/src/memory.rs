//! Reading and writing another process's memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;

/// A range of addresses: start and length in bytes.
pub type Span = (u64, usize);

const SPANS_PER_CALL: usize = 1024;

/// Reads `spans` of `pid` one after another into `target`, whose length is their sum
/// (process_vm_readv(2)). Returns how many bytes were read before the first address that is not
/// mapped; all of them on success.
pub fn read(pid: HostPid, spans: &[Span], target: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    for chunk in spans.chunks(SPANS_PER_CALL) {
        let remote = iovecs(chunk);
        let wanted: usize = chunk.iter().map(|span| span.1).sum();
        let local = target
            .get_mut(done..done + wanted)
            .ok_or_else(|| KernelError::Unexpected("read target too short".into()))?;
        let local = libc::iovec { iov_base: local.as_mut_ptr().cast(), iov_len: wanted };
        let count = remote.len() as libc::c_ulong;
        let (local, remote) = (&raw const local, remote.as_ptr());
        // SAFETY: `local` describes an exclusive borrow of `wanted` bytes.
        let got = unsafe { libc::process_vm_readv(pid.0, local, 1, remote, count, 0) };
        match transferred(pid, "read guest memory", got)? {
            got if got < wanted => return Ok(done + got),
            got => done += got,
        }
    }
    Ok(done)
}

/// Writes `source` over `spans` of `pid` (process_vm_writev(2)); the mappings must be writable.
/// Returns how many bytes were written before the first address that refused.
pub fn write(pid: HostPid, spans: &[Span], source: &[u8]) -> Result<usize> {
    let mut done = 0;
    for chunk in spans.chunks(SPANS_PER_CALL) {
        let remote = iovecs(chunk);
        let wanted: usize = chunk.iter().map(|span| span.1).sum();
        let local = source
            .get(done..done + wanted)
            .ok_or_else(|| KernelError::Unexpected("write source too short".into()))?;
        let local = libc::iovec { iov_base: local.as_ptr() as *mut _, iov_len: wanted };
        let count = remote.len() as libc::c_ulong;
        let (local, remote) = (&raw const local, remote.as_ptr());
        // SAFETY: `local` describes a borrow of `wanted` bytes that the call only reads.
        let got = unsafe { libc::process_vm_writev(pid.0, local, 1, remote, count, 0) };
        match transferred(pid, "write guest memory", got)? {
            got if got < wanted => return Ok(done + got),
            got => done += got,
        }
    }
    Ok(done)
}

/// Writes pieces to their addresses in `pid`, as [`write`] does.
pub fn write_pieces(pid: HostPid, pieces: &[(u64, &[u8])]) -> Result<usize> {
    let mut done = 0;
    for chunk in pieces.chunks(SPANS_PER_CALL) {
        let spans: Vec<Span> = chunk.iter().map(|(start, bytes)| (*start, bytes.len())).collect();
        let remote = iovecs(&spans);
        let local = chunk.iter().map(|(_, bytes)| (bytes.as_ptr() as u64, bytes.len()));
        let local = iovecs(&local.collect::<Vec<Span>>());
        let wanted: usize = spans.iter().map(|span| span.1).sum();
        let (ours, theirs) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
        let (local, remote) = (local.as_ptr(), remote.as_ptr());
        // SAFETY: `local` describes borrows that the call only reads.
        let got = unsafe { libc::process_vm_writev(pid.0, local, ours, remote, theirs, 0) };
        match transferred(pid, "write guest memory", got)? {
            got if got < wanted => return Ok(done + got),
            got => done += got,
        }
    }
    Ok(done)
}

fn iovecs(spans: &[Span]) -> Vec<libc::iovec> {
    spans
        .iter()
        .map(|&(start, bytes)| libc::iovec { iov_base: start as *mut _, iov_len: bytes })
        .collect()
}

fn transferred(pid: HostPid, verb: &'static str, got: libc::ssize_t) -> Result<usize> {
    if got >= 0 {
        return Ok(got as usize);
    }
    match KernelError::last(verb) {
        error if error.is_died() => Err(KernelError::Died(pid)),
        error if error.errno() == Some(libc::EFAULT) => Ok(0),
        error => Err(error),
    }
}

/// `/proc/PID/mem`: writes even where the mapping is read-only (private mappings; proc(5)).
///
/// It does not wait for pages that are still to come (`userfaultfd`): it fails with EIO, and the
/// calls that do wait are made then.
#[derive(Debug)]
pub struct ProcMem(File, HostPid);

impl ProcMem {
    /// Opens the memory of a process that the calling thread traces.
    pub fn open(pid: HostPid) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(KernelError::io("open process memory"))?;
        Ok(Self(file, pid))
    }

    /// Writes all of `source` at `address`.
    pub fn write_all(&self, address: u64, source: &[u8]) -> Result<()> {
        match self.0.write_all_at(source, address) {
            Err(error) if is_missing(&error) => {
                let written = write(self.1, &[(address, source.len())], source)?;
                complete(written, source.len(), "write process memory")
            }
            written => written.map_err(KernelError::io("write process memory")),
        }
    }

    /// Fills `target` from `address`.
    pub fn read_exact(&self, address: u64, target: &mut [u8]) -> Result<()> {
        match self.0.read_exact_at(target, address) {
            Ok(()) => Ok(()),
            Err(error) if is_missing(&error) => {
                let got = read(self.1, &[(address, target.len())], target)?;
                complete(got, target.len(), "read process memory")
            }
            // The memory of a process that has ended has no bytes.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(KernelError::Died(self.1))
            }
            Err(source) => Err(KernelError::Call { verb: "read process memory", source }),
        }
    }
}

fn is_missing(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

fn complete(done: usize, wanted: usize, verb: &'static str) -> Result<()> {
    if done == wanted { Ok(()) } else { Err(KernelError::from_errno(verb, libc::EIO)) }
}
