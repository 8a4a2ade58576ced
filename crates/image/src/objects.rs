//! Open files: one entry per *open file description*, however many descriptors point at it.

use minicbor::{Decode, Encode};

use crate::ipc::PosixQueue;
use crate::memory::SharedId;
use crate::numeric_name;
use crate::sockets::{NetlinkSocket, TcpSocket, UdpSocket, UnixSocket};
use crate::tree::{GuestPid, HostPath};

numeric_name!(
    /// An open file description within one checkpoint.
    FileId(u32)
);

/// An entry of a descriptor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Descriptor {
    /// Number.
    #[n(0)]
    pub fd: i32,
    /// What it points at.
    #[n(1)]
    pub file: FileId,
    /// `FD_CLOEXEC`.
    #[n(2)]
    pub close_on_exec: bool,
}

/// An open file description.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct OpenFile {
    /// Its name within the checkpoint.
    #[n(0)]
    pub id: FileId,
    /// `F_GETFL` status flags and access mode.
    #[n(1)]
    pub flags: u32,
    /// `F_GETOWN_EX` type and number, `F_GETSIG`; type -1 for none.
    #[n(2)]
    pub owner: FileOwner,
    /// What it is.
    #[n(3)]
    pub object: Object,
}

/// Who gets SIGIO (fcntl(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct FileOwner {
    /// `F_OWNER_*`.
    #[n(0)]
    pub kind: i32,
    /// Thread, process or group; 0 for none.
    #[n(1)]
    pub number: GuestPid,
    /// Signal, 0 for SIGIO.
    #[n(2)]
    pub signal: i32,
}

/// The kernel objects we know. What is not here is refused.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Object {
    /// A regular file.
    #[n(0)]
    Regular(#[n(0)] RegularFile),
    /// A directory.
    #[n(1)]
    Directory(#[n(0)] DirectoryFile),
    /// A pipe end, or a FIFO that has a path.
    #[n(2)]
    Pipe(#[n(0)] PipeEnd),
    /// eventfd(2).
    #[n(3)]
    EventFd(#[n(0)] EventFd),
    /// epoll(7).
    #[n(4)]
    Epoll(#[n(0)] Epoll),
    /// timerfd_create(2).
    #[n(5)]
    TimerFd(#[n(0)] TimerFd),
    /// signalfd(2).
    #[n(6)]
    SignalFd(#[n(0)] SignalFd),
    /// inotify(7).
    #[n(7)]
    Inotify(#[n(0)] Inotify),
    /// pidfd_open(2).
    #[n(8)]
    PidFd(#[n(0)] PidFd),
    /// memfd_create(2); the bytes belong to the shared object.
    #[n(9)]
    Memfd(#[n(0)] MemfdFile),
    /// /dev/null, zero, full, random, urandom.
    #[n(10)]
    Device(#[n(0)] DeviceFile),
    /// A descriptor that led out of the guest: terminal, pipe, file or socket given at start.
    #[n(11)]
    Outside(#[n(0)] OutsideFile),
    /// AF_UNIX.
    #[n(12)]
    Unix(#[n(0)] UnixSocket),
    /// UDP.
    #[n(13)]
    Udp(#[n(0)] UdpSocket),
    /// TCP in any state.
    #[n(14)]
    Tcp(#[n(0)] TcpSocket),
    /// AF_NETLINK without pending answers.
    #[n(15)]
    Netlink(#[n(0)] NetlinkSocket),
    /// POSIX message queue descriptor.
    #[n(16)]
    MessageQueue(#[n(0)] MessageQueueFile),
    /// A file of /proc or /sys, opened again by path.
    #[n(17)]
    Proc(#[n(0)] ProcFile),
}

/// A regular file.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct RegularFile {
    /// Path in the guest.
    #[n(0)]
    pub path: HostPath,
    /// Inode number in a replicated directory when the name is gone.
    #[n(1)]
    pub unlinked_inode: Option<u64>,
    /// Offset.
    #[n(2)]
    pub offset: u64,
    /// fcntl(2) and flock(2) locks held through it.
    #[n(3)]
    pub locks: Vec<FileLock>,
    /// Size, checked at restore for files that are compared, not carried.
    #[n(4)]
    pub bytes: u64,
}

/// A lock as `/proc/PID/fdinfo` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct FileLock {
    /// Kind.
    #[n(0)]
    pub kind: LockKind,
    /// Exclusive (write) rather than shared.
    #[n(1)]
    pub exclusive: bool,
    /// First byte.
    #[n(2)]
    pub start: u64,
    /// Length in bytes, 0 to the end of the file.
    #[n(3)]
    pub length: u64,
    /// Process that holds it (POSIX locks).
    #[n(4)]
    pub holder: GuestPid,
}

/// Kinds of file locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum LockKind {
    /// `F_SETLK`, owned by a process.
    #[n(0)]
    Posix,
    /// `F_OFD_SETLK`, owned by the open file description.
    #[n(1)]
    OpenFile,
    /// flock(2).
    #[n(2)]
    Flock,
}

/// A directory.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct DirectoryFile {
    /// Path in the guest.
    #[n(0)]
    pub path: HostPath,
    /// getdents(2) position.
    #[n(1)]
    pub offset: u64,
}

/// One end of a pipe or FIFO. All ends with the same `pipe` number share one buffer.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct PipeEnd {
    /// Inode number on the primary: the identity of the pipe.
    #[n(0)]
    pub pipe: u64,
    /// Path, for a FIFO.
    #[n(1)]
    pub fifo: Option<HostPath>,
    /// `F_GETPIPE_SZ`, bytes.
    #[n(2)]
    pub capacity_bytes: u32,
    /// Unread bytes; only in the entry with the lowest id of this pipe.
    #[n(3)]
    pub contents: Option<PipeContents>,
}

/// Unread bytes of a pipe.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct PipeContents {
    /// The bytes.
    #[n(0)]
    #[cbor(with = "minicbor::bytes")]
    pub bytes: Vec<u8>,
    /// Lengths of packets, for `O_DIRECT` pipes; empty for byte streams.
    #[n(1)]
    pub packets: Vec<u32>,
}

/// eventfd(2).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct EventFd {
    /// Counter.
    #[n(0)]
    pub count: u64,
    /// `EFD_SEMAPHORE`.
    #[n(1)]
    pub semaphore: bool,
}

/// epoll(7).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Epoll {
    /// Registrations in the order of `/proc/PID/fdinfo`.
    #[n(0)]
    pub watches: Vec<EpollWatch>,
}

/// One registration.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct EpollWatch {
    /// Descriptor number at registration.
    #[n(0)]
    pub fd: i32,
    /// `EPOLL*`.
    #[n(1)]
    pub events: u32,
    /// `epoll_data`.
    #[n(2)]
    pub data: u64,
    /// What is watched. Not always what `fd` means now: epoll(7), question 6.
    #[n(3)]
    pub file: FileId,
    /// A process that has both the instance and, at `fd`, the file; 0 where none has. A watch on a
    /// signalfd is made from there, since it sees the signals of the process that made it.
    #[n(4)]
    pub process: GuestPid,
}

/// timerfd_create(2).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct TimerFd {
    /// Clock number.
    #[n(0)]
    pub clock: i32,
    /// Expirations not yet read.
    #[n(1)]
    pub ticks: u64,
    /// timerfd_settime flags (`TFD_TIMER_ABSTIME`, `TFD_TIMER_CANCEL_ON_SET`).
    #[n(2)]
    pub settime_flags: u32,
    /// Time to the next expiry, ns; 0 is disarmed.
    #[n(3)]
    pub value_ns: u64,
    /// Period, ns.
    #[n(4)]
    pub interval_ns: u64,
}

/// signalfd(2).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct SignalFd {
    /// Signals accepted.
    #[n(0)]
    pub mask: u64,
}

/// inotify(7).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Inotify {
    /// Watches.
    #[n(0)]
    pub watches: Vec<InotifyWatch>,
    /// Unread events, as `struct inotify_event` records.
    #[n(1)]
    #[cbor(with = "minicbor::bytes")]
    pub queued: Vec<u8>,
    /// Unread events are lost: the reader is told so (`IN_Q_OVERFLOW`).
    #[n(2)]
    #[cbor(default)]
    pub overflow: bool,
}

/// One inotify watch.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct InotifyWatch {
    /// Watch descriptor.
    #[n(0)]
    pub wd: i32,
    /// What is watched.
    #[n(1)]
    pub path: HostPath,
    /// `IN_*`.
    #[n(2)]
    pub mask: u32,
}

/// pidfd_open(2).
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct PidFd {
    /// The process (or thread, where the flags have `PIDFD_THREAD`), in the guest's numbering;
    /// -1 where it has ended and been waited for.
    #[n(0)]
    pub process: GuestPid,
}

/// A memfd's open file description.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct MemfdFile {
    /// The memory.
    #[n(0)]
    pub object: SharedId,
    /// Offset.
    #[n(1)]
    pub offset: u64,
}

/// A device without state.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct DeviceFile {
    /// `/dev/null` and so on.
    #[n(0)]
    pub path: HostPath,
}

/// A descriptor that leads out of the guest.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct OutsideFile {
    /// Which of the descriptors `hotspare run` passed in: 0, 1 or 2.
    #[n(0)]
    pub standard: i32,
    /// What it was: `terminal`, `pipe`, `file`, `socket`.
    #[n(1)]
    pub kind: String,
}

/// A POSIX message queue.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct MessageQueueFile {
    /// Name with the leading slash.
    #[n(0)]
    pub name: String,
    /// The queue has no name any more: it is made for its descriptors.
    #[n(1)]
    pub unlinked: Option<UnlinkedQueue>,
}

/// A message queue that was unlinked while it is open.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct UnlinkedQueue {
    /// Inode number on the primary: which queue it is.
    #[n(0)]
    pub inode: u64,
    /// What it is and holds; in the first description of it only.
    #[n(1)]
    pub queue: Option<PosixQueue>,
}

/// A file of /proc or /sys.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct ProcFile {
    /// Path in the guest.
    #[n(0)]
    pub path: HostPath,
    /// Offset.
    #[n(1)]
    pub offset: u64,
    /// Of a listing of mappings (maps, smaps) that has been read in part: where it goes on.
    #[n(2)]
    pub listing: Option<ListingPosition>,
}

/// A place in a listing of mappings, whose lines may have other lengths where it is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct ListingPosition {
    /// The first address of the mapping that is told of next; `u64::MAX` at the end.
    #[n(0)]
    pub address: u64,
    /// So many bytes of what is told of it have not been read; 0 if nothing of it has been.
    #[n(1)]
    pub left: u64,
}
