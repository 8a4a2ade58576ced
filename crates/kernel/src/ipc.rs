//! System V IPC and POSIX message queues of the calling thread's ipc namespace.
//!
//! The lists (`/proc/sysvipc/*`, the mqueue file system) can be opened on a thread inside a
//! namespace and read by anyone; the calls need a thread inside.

use std::ffi::CString;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::error::{KernelError, Result, check};

/// `MSG_COPY` (linux/msg.h).
const MSG_COPY: i32 = 0o40000;

/// Owner and permission of a System V object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

fn permission(ownership: Ownership) -> libc::ipc_perm {
    // SAFETY: all zero is a valid `ipc_perm`.
    let mut permission: libc::ipc_perm = unsafe { zeroed() };
    permission.uid = ownership.uid;
    permission.gid = ownership.gid;
    permission.mode = ownership.mode as _;
    permission
}

/// semget(2) of a new set; its number.
pub fn create_semaphores(key: i32, count: i32, ownership: Ownership) -> Result<i32> {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | (ownership.mode & 0o777) as i32;
    // SAFETY: no pointer is passed.
    let id = unsafe { libc::semget(key, count, flags) };
    let id = check("create semaphores", id.into())? as i32;
    // SAFETY: all zero is a valid `semid_ds`.
    let mut state: libc::semid_ds = unsafe { zeroed() };
    state.sem_perm = permission(ownership);
    // SAFETY: IPC_SET reads a `semid_ds`.
    let ret = unsafe { libc::semctl(id, 0, libc::IPC_SET, &raw mut state) };
    check("give semaphores their owner", ret.into())?;
    Ok(id)
}

/// semctl(2), `GETALL`: values of the `count` semaphores of a set.
pub fn semaphore_values(id: i32, count: usize) -> Result<Vec<u16>> {
    let mut values = vec![0u16; count];
    // SAFETY: GETALL writes one u16 for each semaphore; sets never change their size.
    let ret = unsafe { libc::semctl(id, 0, libc::GETALL, values.as_mut_ptr()) };
    check("read semaphores", ret.into())?;
    Ok(values)
}

/// semctl(2), `GETPID`: the last process that changed a semaphore, in our numbering.
pub fn semaphore_pid(id: i32, index: i32) -> Result<i32> {
    // SAFETY: GETPID takes no argument.
    let ret = unsafe { libc::semctl(id, index, libc::GETPID) };
    Ok(check("read semaphore's process", ret.into())? as i32)
}

/// One operation of semop(2): semaphore, what is added (0 waits for zero), flags.
pub type SemaphoreChange = (u16, i16, i32);

/// The bytes of an array of `struct sembuf`, for a call made inside the guest.
pub fn semaphore_changes(changes: &[SemaphoreChange]) -> Vec<u8> {
    let each = changes.iter().flat_map(|(index, by, flags)| {
        [index.to_ne_bytes(), by.to_ne_bytes(), (*flags as i16).to_ne_bytes()]
    });
    each.flatten().collect()
}

/// semctl(2), `SETALL`.
pub fn set_semaphore_values(id: i32, values: &[u16]) -> Result<()> {
    // SAFETY: SETALL reads one u16 for each semaphore; the caller created the set this long.
    let ret = unsafe { libc::semctl(id, 0, libc::SETALL, values.as_ptr()) };
    check("set semaphores", ret.into()).map(drop)
}

/// msgget(2) of a new queue; its number.
pub fn create_queue(key: i32, ownership: Ownership, capacity_bytes: u64) -> Result<i32> {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | (ownership.mode & 0o777) as i32;
    // SAFETY: no pointer is passed.
    let id = unsafe { libc::msgget(key, flags) };
    let id = check("create message queue", id.into())? as i32;
    // SAFETY: all zero is a valid `msqid_ds`.
    let mut state: libc::msqid_ds = unsafe { zeroed() };
    state.msg_perm = permission(ownership);
    state.msg_qbytes = capacity_bytes;
    // SAFETY: IPC_SET reads a `msqid_ds`.
    let ret = unsafe { libc::msgctl(id, libc::IPC_SET, &raw mut state) };
    check("give message queue its owner", ret.into())?;
    Ok(id)
}

/// msgctl(2), `IPC_STAT`: most bytes a queue holds.
pub fn queue_capacity(id: i32) -> Result<u64> {
    // SAFETY: all zero is a valid `msqid_ds`.
    let mut state: libc::msqid_ds = unsafe { zeroed() };
    // SAFETY: IPC_STAT writes a `msqid_ds`.
    let ret = unsafe { libc::msgctl(id, libc::IPC_STAT, &raw mut state) };
    check("measure message queue", ret.into())?;
    Ok(state.msg_qbytes)
}

/// msgrcv(2) with `MSG_COPY`: the message at `index`, which stays; `None` behind the last.
/// Needs `CONFIG_CHECKPOINT_RESTORE`.
pub fn copy_message(id: i32, index: i64, capacity: usize) -> Result<Option<(i64, Vec<u8>)>> {
    let mut buffer = vec![0u64; 1 + capacity.div_ceil(8)];
    let flags = MSG_COPY | libc::IPC_NOWAIT;
    let pointer = buffer.as_mut_ptr().cast();
    // SAFETY: the buffer holds the type and `capacity` bytes.
    let ret = unsafe { libc::msgrcv(id, pointer, capacity, index, flags) };
    let length = match check("copy message", ret as libc::c_long) {
        Ok(length) => length as usize,
        Err(error) if error.errno() == Some(libc::ENOMSG) => return Ok(None),
        Err(error) => return Err(error),
    };
    let kind = buffer[0] as i64;
    let bytes = buffer[1..].iter().flat_map(|word| word.to_ne_bytes()).take(length);
    Ok(Some((kind, bytes.collect())))
}

/// msgrcv(2): takes the first message of type `kind`, which is not longer than 8 bytes.
pub fn take_message(id: i32, kind: i64) -> Result<()> {
    let mut buffer = [0u64; 2];
    let pointer = buffer.as_mut_ptr().cast();
    // SAFETY: the buffer holds the type and 8 bytes.
    let ret = unsafe { libc::msgrcv(id, pointer, 8, kind, libc::IPC_NOWAIT) };
    check("take message", ret as libc::c_long).map(drop)
}

/// msgsnd(2), without waiting.
pub fn send_message(id: i32, kind: i64, bytes: &[u8]) -> Result<()> {
    let mut buffer = vec![0u64; 1 + bytes.len().div_ceil(8)];
    buffer[0] = kind as u64;
    for (word, chunk) in buffer[1..].iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(padded);
    }
    // SAFETY: the buffer holds the type and the bytes.
    let ret = unsafe { libc::msgsnd(id, buffer.as_ptr().cast(), bytes.len(), libc::IPC_NOWAIT) };
    check("send message", ret.into()).map(drop)
}

/// shmget(2) of a new segment; its number.
pub fn create_segment(key: i32, bytes: u64, ownership: Ownership) -> Result<i32> {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | (ownership.mode & 0o777) as i32;
    // SAFETY: no pointer is passed.
    let id = unsafe { libc::shmget(key, bytes as usize, flags) };
    let id = check("create shared memory segment", id.into())? as i32;
    own_segment(id, ownership)?;
    Ok(id)
}

/// shmctl(2), `IPC_SET`.
pub fn own_segment(id: i32, ownership: Ownership) -> Result<()> {
    // SAFETY: all zero is a valid `shmid_ds`.
    let mut state: libc::shmid_ds = unsafe { zeroed() };
    state.shm_perm = permission(ownership);
    // SAFETY: IPC_SET reads a `shmid_ds`.
    let ret = unsafe { libc::shmctl(id, libc::IPC_SET, &raw mut state) };
    check("give segment its owner", ret.into()).map(drop)
}

/// shmctl(2), `IPC_RMID`: the segment goes when nobody has it attached.
pub fn remove_segment(id: i32) -> Result<()> {
    // SAFETY: IPC_RMID takes no argument.
    let ret = unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
    check("remove segment", ret.into()).map(drop)
}

/// A segment attached to this process. Never handed out as memory: it is only a way to its file.
#[derive(Debug)]
pub struct Attachment(usize);

impl Attachment {
    /// shmat(2).
    pub fn new(id: i32) -> Result<Self> {
        // SAFETY: the kernel chooses the address, nothing of ours is replaced.
        let address = unsafe { libc::shmat(id, std::ptr::null(), 0) };
        check("attach segment", address as libc::c_long)?;
        Ok(Self(address as usize))
    }

    /// Address of the attachment in this process.
    pub fn address(&self) -> usize {
        self.0
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // SAFETY: the address came from shmat; no reference into the memory exists.
        unsafe { libc::shmdt(self.0 as *const libc::c_void) };
    }
}

/// The mqueue file system of the calling thread's ipc namespace, mounted nowhere: its root
/// directory. Each file in it is a queue.
pub fn queue_directory() -> Result<OwnedFd> {
    let name = c"mqueue";
    // SAFETY: `name` ends with a zero byte.
    let context = unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), 1) };
    let context = check("open mqueue file system", context)?;
    // SAFETY: the kernel just gave us this descriptor.
    let context = unsafe { OwnedFd::from_raw_fd(context as i32) };
    let (null, create) = (std::ptr::null::<u8>(), 6);
    // SAFETY: FSCONFIG_CMD_CREATE takes no key and no value.
    let ret =
        unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), create, null, null, 0) };
    check("make mqueue file system", ret)?;
    // SAFETY: no pointer is passed. Close-on-exec, no mount attributes.
    let root = unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0) };
    let root = check("mount mqueue file system", root)?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(root as i32) })
}

/// `struct mq_attr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueAttributes {
    /// Most messages.
    pub messages_max: i64,
    /// Longest message, bytes.
    pub message_bytes_max: i64,
    /// Messages in it.
    pub messages: i64,
}

/// mq_getattr(3).
pub fn queue_attributes(queue: BorrowedFd<'_>) -> Result<QueueAttributes> {
    let mut attributes = [0i64; 8];
    let null = std::ptr::null::<i64>();
    let pointer = attributes.as_mut_ptr();
    // SAFETY: the kernel writes a `struct mq_attr`, eight longs.
    let ret = unsafe { libc::syscall(libc::SYS_mq_getsetattr, queue.as_raw_fd(), null, pointer) };
    check("read message queue's attributes", ret)?;
    let [_, messages_max, message_bytes_max, messages, ..] = attributes;
    Ok(QueueAttributes { messages_max, message_bytes_max, messages })
}

/// mq_open(3) of a new queue, open for reading and writing; `name` has no slash in front.
pub fn create_posix_queue(name: &str, mode: u32, attributes: QueueAttributes) -> Result<OwnedFd> {
    let name = CString::new(name)
        .map_err(|_| KernelError::Unexpected("a queue's name with a zero byte".into()))?;
    let words: [i64; 8] = [0, attributes.messages_max, attributes.message_bytes_max, 0, 0, 0, 0, 0];
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let (name, words) = (name.as_ptr(), words.as_ptr());
    // SAFETY: `name` ends with a zero byte, `words` is a `struct mq_attr`; both outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_mq_open, name, flags, mode, words) };
    let fd = check("create message queue", fd)?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// mq_receive(3) on a descriptor with `O_NONBLOCK`; `None` where the queue is empty.
pub fn take_posix_message(
    queue: BorrowedFd<'_>,
    capacity: usize,
) -> Result<Option<(u32, Vec<u8>)>> {
    let mut bytes = vec![0u8; capacity];
    let mut priority = 0u32;
    let (fd, pointer) = (queue.as_raw_fd(), bytes.as_mut_ptr());
    let (wait, priority_pointer) = (std::ptr::null::<libc::timespec>(), &raw mut priority);
    let call = libc::SYS_mq_timedreceive;
    // SAFETY: pointer and capacity describe `bytes`; the priority has a place.
    let ret = unsafe { libc::syscall(call, fd, pointer, capacity, priority_pointer, wait) };
    match check("take message", ret) {
        Ok(length) => {
            bytes.truncate(length as usize);
            Ok(Some((priority, bytes)))
        }
        Err(error) if error.errno() == Some(libc::EAGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// mq_send(3) on a descriptor with `O_NONBLOCK`.
pub fn send_posix_message(queue: BorrowedFd<'_>, priority: u32, bytes: &[u8]) -> Result<()> {
    let (fd, pointer, length) = (queue.as_raw_fd(), bytes.as_ptr(), bytes.len());
    let wait = std::ptr::null::<libc::timespec>();
    let call = libc::SYS_mq_timedsend;
    // SAFETY: pointer and length describe the caller's bytes, which are only read.
    let ret = unsafe { libc::syscall(call, fd, pointer, length, priority, wait) };
    check("send message", ret).map(drop)
}
