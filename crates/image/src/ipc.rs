//! System V and POSIX inter-process communication that has no descriptor.

use minicbor::{Decode, Encode};

use crate::tree::GuestPid;

/// The guest's ipc namespace.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct Ipc {
    /// Semaphore sets.
    #[n(0)]
    pub semaphores: Vec<SemaphoreSet>,
    /// System V message queues.
    #[n(1)]
    pub message_queues: Vec<SysvQueue>,
    /// POSIX message queues.
    #[n(2)]
    pub posix_queues: Vec<PosixQueue>,
    /// Shared memory segments somebody used; their bytes and names travel as shared memory.
    #[n(3)]
    #[cbor(default)]
    pub segments: Vec<SegmentUse>,
}

/// Who used a System V shared memory segment last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SegmentUse {
    /// Identifier.
    #[n(0)]
    pub id: i32,
    /// `shm_lpid`.
    #[n(1)]
    pub last: GuestPid,
}

/// Owner and mode of a System V object.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct IpcOwner {
    /// Identifier.
    #[n(0)]
    pub id: i32,
    /// Key.
    #[n(1)]
    pub key: i32,
    /// Mode bits.
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
}

/// semget(2).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct SemaphoreSet {
    /// Who and what.
    #[n(0)]
    pub owner: IpcOwner,
    /// Value and last pid of each semaphore; 0 for none, and for a process that has ended.
    #[n(1)]
    pub values: Vec<(u16, i32)>,
    /// What is added when a process ends (`SEM_UNDO`); only what is not 0.
    #[n(2)]
    #[cbor(default)]
    pub undo: Vec<SemaphoreUndo>,
}

/// An adjustment that waits for the end of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SemaphoreUndo {
    /// The process.
    #[n(0)]
    pub process: GuestPid,
    /// Which semaphore of the set.
    #[n(1)]
    pub index: u16,
    /// What is added to it.
    #[n(2)]
    pub by: i16,
}

/// msgget(2).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct SysvQueue {
    /// Who and what.
    #[n(0)]
    pub owner: IpcOwner,
    /// `msg_qbytes`.
    #[n(1)]
    pub capacity_bytes: u64,
    /// Messages, oldest first: type and bytes.
    #[n(2)]
    pub messages: Vec<SysvMessage>,
    /// `msg_lspid`; 0 for none, and for a process that has ended.
    #[n(3)]
    #[cbor(default)]
    pub last_sender: GuestPid,
    /// `msg_lrpid`, likewise.
    #[n(4)]
    #[cbor(default)]
    pub last_receiver: GuestPid,
}

/// A message of a System V queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct SysvMessage {
    /// `mtype`.
    #[n(0)]
    pub kind: i64,
    /// The bytes.
    #[n(1)]
    #[cbor(with = "minicbor::bytes")]
    pub bytes: Vec<u8>,
}

/// mq_open(3).
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct PosixQueue {
    /// Name with the leading slash.
    #[n(0)]
    pub name: String,
    /// Mode bits.
    #[n(1)]
    pub mode: u32,
    /// Owner and group.
    #[n(2)]
    pub owner: (u32, u32),
    /// `mq_maxmsg`, `mq_msgsize`.
    #[n(3)]
    pub limits: (i64, i64),
    /// Messages: priority and bytes, in delivery order.
    #[n(4)]
    pub messages: Vec<PosixMessage>,
}

/// A message of a POSIX queue.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
#[cbor(array)]
pub struct PosixMessage {
    /// Priority.
    #[n(0)]
    pub priority: u32,
    /// The bytes.
    #[n(1)]
    #[cbor(with = "minicbor::bytes")]
    pub bytes: Vec<u8>,
}
