//! sock_diag(7): what the kernel knows of AF_UNIX sockets and no system call shows.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use crate::error::{KernelError, Result};
use crate::socket;

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const REQUEST_DUMP: u16 = 0x301;
/// `NLMSG_ERROR`, `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Bytes of `struct nlmsghdr`, `struct unix_diag_msg`.
const HEADER_BYTES: usize = 16;
const UNIX_MESSAGE_BYTES: usize = 16;
/// `UDIAG_SHOW_NAME | VFS | PEER | ICONS | RQLEN`.
const SHOW: u32 = 0x1f;

/// One AF_UNIX socket of a network namespace (linux/unix_diag.h).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnixEntry {
    /// Inode number of its descriptor; lower 32 bits.
    pub inode: u64,
    /// `SOCK_STREAM`, `SOCK_DGRAM`, `SOCK_SEQPACKET`.
    pub kind: i32,
    /// 1 connected, 7 neither, 10 listening.
    pub state: u8,
    /// Bound name without the family: a path, or a zero byte and an abstract name.
    pub name: Vec<u8>,
    /// Inode number (lower 32 bits) of the file it is bound to.
    pub file_inode: Option<u32>,
    /// Inode of the socket it is connected to; none if that is closed or waits in accept(2).
    pub peer: Option<u64>,
    /// Listeners: inodes of the sockets that wait in accept(2), oldest first; 0 for one that
    /// has been closed meanwhile.
    pub waiting: Vec<u64>,
    /// Bytes to read (datagrams: of the first one); for a listener the number that wait.
    pub receive_queue: u32,
    /// Bytes not read by the peer; for a listener its backlog.
    pub send_queue: u32,
    /// shutdown(2): bit 0 receiving, bit 1 sending.
    pub shutdown: u8,
}

/// A netlink socket on which to ask; it belongs to the network namespace of the thread that
/// opened it, whoever uses it.
#[derive(Debug)]
pub struct SockDiag(OwnedFd);

impl SockDiag {
    /// Opens it in the calling thread's network namespace.
    pub fn open() -> Result<Self> {
        let kind = libc::SOCK_RAW;
        Ok(Self(socket::create(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG)?))
    }

    /// All AF_UNIX sockets of the namespace, by inode.
    pub fn unix_sockets(&self) -> Result<HashMap<u64, UnixEntry>> {
        let mut request = Vec::with_capacity(40);
        request.extend(40u32.to_ne_bytes());
        request.extend(BY_FAMILY.to_ne_bytes());
        request.extend(REQUEST_DUMP.to_ne_bytes());
        request.extend([0; 8]);
        request.extend([libc::AF_UNIX as u8, 0, 0, 0]);
        request.extend(u32::MAX.to_ne_bytes());
        request.extend(0u32.to_ne_bytes());
        request.extend(SHOW.to_ne_bytes());
        request.extend([0; 8]);
        socket::send(self.0.as_fd(), &request, 0)?;
        let mut entries = HashMap::new();
        let mut buffer = vec![0u8; 32 << 10];
        loop {
            let length = socket::receive(self.0.as_fd(), &mut buffer, 0)?.unwrap_or(0);
            if take_messages(&buffer[..length], &mut entries)? {
                return Ok(entries);
            }
        }
    }
}

fn number16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_ne_bytes([b[0], b[1]]))
}

fn number32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

/// Reads a datagram of netlink messages; whether the dump ends in it.
fn take_messages(mut bytes: &[u8], entries: &mut HashMap<u64, UnixEntry>) -> Result<bool> {
    while bytes.len() >= HEADER_BYTES {
        let length = number32(bytes, 0) as usize;
        if length < HEADER_BYTES || length > bytes.len() {
            return Err(KernelError::Unexpected(format!("netlink message of {length} bytes")));
        }
        let body = &bytes[HEADER_BYTES..length];
        match number16(bytes, 4) {
            DONE => return Ok(true),
            ERROR => {
                let errno = (number32(body, 0) as i32).wrapping_neg();
                return Err(KernelError::from_errno("list UNIX sockets", errno));
            }
            BY_FAMILY => {
                let entry = unix_entry(body);
                entries.insert(entry.inode, entry);
            }
            _ => {}
        }
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
    }
    Ok(false)
}

fn unix_entry(body: &[u8]) -> UnixEntry {
    let mut entry = UnixEntry {
        kind: i32::from(body.get(1).copied().unwrap_or(0)),
        state: body.get(2).copied().unwrap_or(0),
        inode: u64::from(number32(body, 4)),
        ..UnixEntry::default()
    };
    let mut attributes = body.get(UNIX_MESSAGE_BYTES..).unwrap_or(&[]);
    while attributes.len() >= 4 {
        let length = usize::from(number16(attributes, 0)).clamp(4, attributes.len());
        let value = &attributes[4..length];
        match number16(attributes, 2) {
            0 => entry.name = value.to_vec(),
            1 => entry.file_inode = Some(number32(value, 0)),
            2 => entry.peer = Some(u64::from(number32(value, 0))).filter(|peer| *peer != 0),
            3 => {
                let inodes = value.chunks_exact(4).map(|word| u64::from(number32(word, 0)));
                entry.waiting = inodes.collect();
            }
            4 => {
                entry.receive_queue = number32(value, 0);
                entry.send_queue = number32(value, 4);
            }
            6 => entry.shutdown = value.first().copied().unwrap_or(0),
            _ => {}
        }
        attributes = &attributes[length.next_multiple_of(4).min(attributes.len())..];
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    fn inode(fd: &OwnedFd) -> u64 {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        std::fs::metadata(path).expect("stat").ino()
    }

    #[test]
    fn the_ends_of_a_pair_name_each_other() {
        let (a, b) = socket::pair(libc::AF_UNIX, libc::SOCK_STREAM).expect("pair");
        socket::send(a.as_fd(), b"12345", 0).expect("send");
        let entries = SockDiag::open().and_then(|diag| diag.unix_sockets()).expect("list");
        let (a, b) = (&entries[&inode(&a)], &entries[&inode(&b)]);
        assert_eq!((a.peer, b.peer), (Some(b.inode), Some(a.inode)));
        assert_eq!((a.receive_queue, b.receive_queue), (0, 5));
        assert_eq!((a.state, a.kind), (1, libc::SOCK_STREAM));
    }
}
