//! Marks of TCP sockets.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;

use super::writer::{CONTEXT, IT, THERE, Writer};
use super::{read, unknown};
use crate::bpf::{
    self, EXIT, Kind, PROBE_READ_KERNEL, add, add_register, and, copy, helper, load, load_word,
    set, shift_left, shift_right, shift_right_register, skip_if_zero, skip_unless, store,
};
use crate::btf::Btf;
use crate::error::{KernelError, Result};

/// The register with the process.
const TASK: u8 = 9;
/// Room for a record.
const BUFFER: usize = 1024;
/// Words before the state: number, what [`SocketIdentity`] has.
const HEAD: usize = 5 * 8;
/// `S_IFMT`, `S_IFSOCK`.
const KIND_OF_FILE: i32 = 0xf000;
const SOCKET: i32 = 0xc000;

/// Which descriptor it is: close-on-exec flag, status flags, address and inode number of the open
/// file.
pub type SocketIdentity = [u64; 4];

/// A descriptor of a TCP socket of a stopped process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMark<'a> {
    /// Its number.
    pub fd: i32,
    /// What else the descriptor is.
    pub identity: SocketIdentity,
    /// The socket: addresses, sequence numbers, windows, what was agreed, errors.
    pub state: &'a [u8],
}

/// The program, loaded.
#[derive(Debug)]
pub struct SocketMarks {
    program: OwnedFd,
    bytes: usize,
    /// The program has one buffer.
    turn: Mutex<()>,
}

/// The program, pointed at one process.
#[derive(Debug)]
pub struct WatchedSockets(OwnedFd);

impl SocketMarks {
    pub(super) fn open(btf: &Btf) -> Result<Self> {
        let buffer = bpf::make_buffer(BUFFER)?;
        let iterator = btf.function("bpf_iter_task_file").ok_or_else(|| unknown(None))?;
        let mut writer = Writer::new(btf, &buffer);
        let written = write(&mut writer);
        let missing = writer.missing.take();
        let bytes = written.ok_or_else(|| unknown(missing))?;
        let program = Kind::Iterator(iterator).load(&writer.code)?;
        Ok(Self { program, bytes, turn: Mutex::new(()) })
    }

    /// Points the program at a process.
    pub fn watch(&self, pidfd: &impl AsRawFd) -> Result<WatchedSockets> {
        bpf::iterate_threads(&self.program, pidfd).map(WatchedSockets)
    }

    /// Looks at the descriptors of a process all of whose threads stand still, in the order of
    /// their numbers. What it returns lies in `text`.
    pub fn look<'a>(
        &self,
        watched: &WatchedSockets,
        text: &'a mut Vec<u8>,
    ) -> Result<Vec<SocketMark<'a>>> {
        read(&watched.0, &self.turn, text)?;
        if !text.len().is_multiple_of(self.bytes) {
            return Err(KernelError::Unexpected("marks of sockets".into()));
        }
        let marks = text.chunks_exact(self.bytes).map(|record| {
            let (head, state) = record.split_at(HEAD);
            let word = |index: usize| {
                let bytes = head[index * 8..index * 8 + 8].try_into().unwrap_or_default();
                u64::from_ne_bytes(bytes)
            };
            let identity = [word(1), word(2), word(3), word(4)];
            SocketMark { fd: word(0) as i32, identity, state }
        });
        Ok(marks.collect())
    }
}

/// Writes the program; the bytes of a record.
fn write(writer: &mut Writer<'_>) -> Option<usize> {
    writer.code.extend([copy(CONTEXT, 1), load(IT, CONTEXT, 24), load(TASK, CONTEXT, 8)]);
    let begin = writer.code.len();
    // After the last file there is none; others are no sockets, or not of TCP.
    let over: Vec<_> = vec![set(0, 0), EXIT];
    writer.at = HEAD;
    writer.follow(IT, "file", "f_inode")?;
    let kind = writer.bytes(THERE, "inode", "i_mode", 2)?;
    writer.code.extend(bpf::value_of(1, writer.buffer, kind));
    writer.code.extend([load_word(2, 1, 0), and(2, KIND_OF_FILE), skip_unless(2, SOCKET, 1)]);
    writer.code.push(bpf::skip(over.len() as i16));
    writer.code.extend(over.iter().copied());
    writer.follow(IT, "file", "private_data")?;
    writer.follow(THERE, "socket", "sk")?;
    let protocol = writer.bytes(THERE, "sock", "sk_protocol", 2)?;
    writer.code.extend(bpf::value_of(1, writer.buffer, protocol));
    writer.code.extend([load_word(2, 1, 0), and(2, 0xffff)]);
    writer.code.extend([skip_unless(2, libc::IPPROTO_TCP, 1), bpf::skip(over.len() as i16)]);
    writer.code.extend(over.iter().copied());
    state(writer)?;
    let bytes = writer.at;
    identity(writer)?;
    let record = writer.record(bytes);
    writer.code.extend(record);
    let body = writer.code.split_off(begin);
    writer.code.push(skip_if_zero(IT, body.len() as i16 + 1));
    writer.code.push(skip_if_zero(TASK, body.len() as i16));
    writer.code.extend(body);
    writer.code.extend(over);
    Some(bytes)
}

/// All that a checkpoint says of a connection or a listener, but for options.
fn state(writer: &mut Writer<'_>) -> Option<()> {
    let common = [
        ("skc_addrpair", 8),
        ("skc_portpair", 4),
        ("skc_family", 2),
        ("skc_state", 1),
        ("skc_v6_daddr", 16),
        ("skc_v6_rcv_saddr", 16),
    ];
    writer.pieces(THERE, "sock_common", &common)?;
    let own = [("sk_shutdown", 1), ("sk_err", 4), ("sk_err_soft", 4), ("sk_max_ack_backlog", 4)];
    writer.pieces(THERE, "sock", &own)?;
    let tcp = [
        ("copied_seq", 4),
        ("rcv_nxt", 4),
        ("rcv_wup", 4),
        ("rcv_wnd", 4),
        ("snd_una", 4),
        ("snd_nxt", 4),
        ("write_seq", 4),
        ("snd_wnd", 4),
        ("max_window", 4),
        ("packets_out", 4),
        ("bytes_acked", 8),
        ("bytes_received", 8),
        ("rx_opt", 24),
    ];
    writer.pieces(THERE, "tcp_sock", &tcp)
}

/// The head of a record.
fn identity(writer: &mut Writer<'_>) -> Option<()> {
    let file = std::mem::replace(&mut writer.at, 0);
    writer.code.extend(bpf::value_of(1, writer.buffer, 0));
    writer.code.extend([load_word(2, CONTEXT, 16), store(1, 0, 2), store(1, 24, IT)]);
    writer.at = 16;
    writer.bytes(IT, "file", "f_flags", 4)?;
    writer.at = 32;
    writer.follow(IT, "file", "f_inode")?;
    writer.bytes(THERE, "inode", "i_ino", 8)?;
    writer.at = file;
    // Bit number `fd` of the table's close-on-exec flags.
    writer.follow(TASK, "task_struct", "files")?;
    writer.follow(THERE, "files_struct", "fdt")?;
    writer.follow(THERE, "fdtable", "close_on_exec")?;
    writer.code.extend([load_word(3, CONTEXT, 16), shift_right(3, 6), shift_left(3, 3)]);
    writer.code.extend([add_register(3, THERE), copy(1, 10), add(1, -8), set(2, 8)]);
    writer.code.extend([helper(PROBE_READ_KERNEL), load(2, 10, -8), load_word(3, CONTEXT, 16)]);
    writer.code.extend([and(3, 63), shift_right_register(2, 3), and(2, 1)]);
    writer.code.extend(bpf::value_of(1, writer.buffer, 8));
    writer.code.push(store(1, 0, 2));
    Some(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::super::Marks;
    use super::*;
    use crate::pidfd;
    use crate::ptrace::HostPid;

    /// Identity and state of a socket of ours.
    fn look(socket: &impl AsRawFd) -> (SocketIdentity, Vec<u8>) {
        let marks = Marks::load().expect("loads").sockets.as_ref().expect("loads");
        let own = pidfd::open(HostPid(std::process::id() as i32)).expect("opens");
        let watched = marks.watch(&own).expect("watches");
        let mut text = Vec::new();
        let all = marks.look(&watched, &mut text).expect("looks");
        assert!(all.is_sorted_by_key(|mark| mark.fd));
        let found = all.iter().find(|mark| mark.fd == socket.as_raw_fd()).expect("is seen");
        (found.identity, found.state.to_vec())
    }

    #[test]
    fn a_connection_changes_its_mark_with_each_byte_and_not_without() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let mut near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (mut far, _) = listener.accept().expect("accepts");
        let (mut last_near, mut last_far) = (look(&near), look(&far));
        assert_eq!(look(&near), last_near);
        let waiting = look(&listener);
        near.write_all(b"x").expect("writes");
        far.peek(&mut [0]).expect("arrives");
        let (now_near, now_far) = (look(&near), look(&far));
        assert_ne!((&now_near.1, &now_far.1), (&last_near.1, &last_far.1));
        assert_ne!(now_near.1, last_near.1);
        assert_ne!(now_far.1, last_far.1);
        (last_near, last_far) = (now_near, now_far);
        far.read_exact(&mut [0]).expect("reads");
        assert_ne!(look(&far).1, last_far.1, "what was read is gone");
        assert_eq!(look(&near).0, last_near.0, "it is the same descriptor");
        assert_eq!(look(&listener), waiting);
    }

    #[test]
    fn a_descriptor_that_is_to_be_closed_by_exec_has_another_mark() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("binds");
        let before = look(&socket);
        assert_eq!(before.0[0], 1);
        fcntl(&socket, FcntlArg::F_SETFD(FdFlag::empty())).expect("clears the flag");
        let after = look(&socket);
        assert_eq!((after.0[0], &after.1), (0, &before.1));
        assert_eq!(after.0[1..], before.0[1..]);
    }
}
