//! What cannot be done from outside: system calls that a process of the ghost must make itself,
//! after its descriptors are in place.

use std::collections::BTreeMap;

use hotspare_image::objects::{
    Descriptor, FileId, FileLock, FileOwner, LockKind, Object, OpenFile,
};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::descriptor::{SIGNAL_OWNER_COMMANDS, lock_record, lock_record_bytes};
use hotspare_kernel::epoll::event_bytes;
use hotspare_kernel::remote::Call;

use super::error::{ObjectError, ObjectResult};

/// A call to make in a process of the ghost, with its own descriptor numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteStep {
    /// epoll_ctl(2), `EPOLL_CTL_ADD`.
    Watch {
        /// Where.
        process: GuestPid,
        /// The instance.
        epoll: i32,
        /// What it watches.
        target: i32,
        /// `EPOLL*`.
        events: u32,
        /// `epoll_data`.
        data: u64,
    },
    /// fcntl(2), `F_SETLK`: the lock belongs to the process.
    Lock {
        /// Where.
        process: GuestPid,
        /// The file.
        fd: i32,
        /// The lock.
        lock: FileLock,
    },
    /// fcntl(2), `F_SETOWN_EX`: numbers are those of the caller's pid namespace.
    SetOwner {
        /// Where.
        process: GuestPid,
        /// The file.
        fd: i32,
        /// Who.
        owner: FileOwner,
    },
    /// fcntl(2), `F_SETSIG`.
    SetSignal {
        /// Where.
        process: GuestPid,
        /// The file.
        fd: i32,
        /// The signal.
        signal: i32,
    },
    /// fcntl(2), `F_SETFL`: `O_ASYNC`, once there is an owner.
    SetFlags {
        /// Where.
        process: GuestPid,
        /// The file.
        fd: i32,
        /// The flags.
        flags: u32,
    },
}

impl RemoteStep {
    /// The process that must make the call.
    pub fn process(&self) -> GuestPid {
        match self {
            Self::Watch { process, .. }
            | Self::Lock { process, .. }
            | Self::SetOwner { process, .. }
            | Self::SetSignal { process, .. }
            | Self::SetFlags { process, .. } => *process,
        }
    }

    /// The bytes its pointer argument points at; empty where it has none. At most 32.
    pub fn payload(&self) -> Vec<u8> {
        match self {
            Self::Watch { events, data, .. } => event_bytes(*events, *data),
            Self::Lock { lock, .. } => {
                lock_record_bytes(&lock_record(lock.exclusive, lock.start, lock.length))
            }
            Self::SetOwner { owner, .. } => {
                [owner.kind.to_ne_bytes(), owner.number.0.to_ne_bytes()].concat()
            }
            Self::SetSignal { .. } | Self::SetFlags { .. } => Vec::new(),
        }
    }

    /// The call, whose payload lies at address `payload` of the ghost.
    pub fn call(&self, payload: u64) -> Call {
        let (set_owner, set_signal) = SIGNAL_OWNER_COMMANDS;
        let control = |fd: i32, command: i32, value: u64| {
            Call::new(libc::SYS_fcntl, &[fd as u64, command as u64, value])
        };
        match self {
            Self::Watch { epoll, target, .. } => {
                let add = libc::EPOLL_CTL_ADD as u64;
                let arguments = [*epoll as u64, add, *target as u64, payload];
                Call::new(libc::SYS_epoll_ctl, &arguments)
            }
            Self::Lock { fd, .. } => control(*fd, libc::F_SETLK, payload),
            Self::SetOwner { fd, .. } => control(*fd, set_owner, payload),
            Self::SetSignal { fd, signal, .. } => control(*fd, set_signal, *signal as u64),
            Self::SetFlags { fd, flags, .. } => control(*fd, libc::F_SETFL, (*flags).into()),
        }
    }

    /// What failed when the call fails: verb and noun.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Watch { .. } => "watch signalfd with epoll",
            Self::Lock { .. } => "lock file",
            Self::SetOwner { .. } => "set file owner",
            Self::SetSignal { .. } => "set file signal",
            Self::SetFlags { .. } => "set file flags",
        }
    }
}

/// The steps for locks and owners of `files`. Watches come from [`super::epoll`].
pub fn for_files(
    files: &[OpenFile],
    tables: &[(GuestPid, &[Descriptor])],
) -> ObjectResult<Vec<RemoteStep>> {
    let mut steps = Vec::new();
    let mut first: BTreeMap<FileId, (GuestPid, i32)> = BTreeMap::new();
    let special = files.iter().any(needs_steps);
    if !special {
        return Ok(steps);
    }
    for (pid, table) in tables {
        for descriptor in *table {
            first.entry(descriptor.file).or_insert((*pid, descriptor.fd));
        }
    }
    for file in files.iter().filter(|file| needs_steps(file)) {
        if let Object::Regular(image) = &file.object {
            for lock in image.locks.iter().filter(|lock| lock.kind == LockKind::Posix) {
                steps.push(lock_step(file.id, lock, tables)?);
            }
        }
        // A file that only travels in a socket has nobody to set its owner.
        if let Some(&(process, fd)) = first.get(&file.id) {
            signal_steps(file, process, fd, &mut steps);
        }
    }
    Ok(steps)
}

const O_ASYNC: u32 = libc::O_ASYNC as u32;

fn needs_steps(file: &OpenFile) -> bool {
    let locks = match &file.object {
        Object::Regular(image) => image.locks.iter().any(|lock| lock.kind == LockKind::Posix),
        _ => false,
    };
    let owner = &file.owner;
    locks || owner.number != GuestPid(0) || owner.signal != 0 || file.flags & O_ASYNC != 0
}

fn lock_step(
    file: FileId,
    lock: &FileLock,
    tables: &[(GuestPid, &[Descriptor])],
) -> ObjectResult<RemoteStep> {
    let table = tables.iter().find(|(pid, _)| *pid == lock.holder).map(|(_, table)| *table);
    let held = table.and_then(|table| table.iter().find(|each| each.file == file));
    let holder = lock.holder;
    let held = held.ok_or_else(|| {
        ObjectError::Image(format!("process {holder} locks a file that it has not open"))
    })?;
    Ok(RemoteStep::Lock { process: holder, fd: held.fd, lock: lock.clone() })
}

fn signal_steps(file: &OpenFile, process: GuestPid, fd: i32, steps: &mut Vec<RemoteStep>) {
    let owner = file.owner;
    if owner.number != GuestPid(0) {
        steps.push(RemoteStep::SetOwner { process, fd, owner });
    }
    if owner.signal != 0 {
        steps.push(RemoteStep::SetSignal { process, fd, signal: owner.signal });
    }
    if file.flags & O_ASYNC != 0 {
        steps.push(RemoteStep::SetFlags { process, fd, flags: file.flags });
    }
}
