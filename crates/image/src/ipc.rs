//! System V and POSIX inter-process communication that has no descriptor.

use minicbor::{Decode, Encode};

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
    /// Value and last pid of each semaphore.
    #[n(1)]
    pub values: Vec<(u16, i32)>,
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
