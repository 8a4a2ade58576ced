//! System V shared memory, semaphores, message queues, and POSIX message queues: what lives in
//! the guest's ipc namespace and has no descriptor.
//!
//! Most guests have none of it, so an epoch begins with a look at four lists that were opened
//! once: a read each, a few µs. Only when something is there a thread inside the namespace reads
//! it.
//!
//! System V messages can be copied (`MSG_COPY`). POSIX messages cannot: they are taken out and
//! put back in the same order while the guest stands still. A queue on which somebody waits for a
//! notification (mq_notify(3)) is refused: the kernel shows who waits, but not the value to send.
//!
//! Process numbers of last use are set by having the process use the object last, in the ghost
//! (`ghost::ipc_users`); so those of processes that have ended are not. `SEM_UNDO` adjustments no
//! call shows: see [`super::semaphore_undo`]. Not carried: the times of last use.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hotspare_image::Checkpoint;
use hotspare_image::ipc::{
    Ipc, IpcOwner, PosixMessage, PosixQueue, SegmentUse, SemaphoreSet, SemaphoreUndo, SysvMessage,
    SysvQueue,
};
use hotspare_image::memory::SharedKind;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::KernelError;
use hotspare_kernel::ipc::{self, Attachment, Ownership, QueueAttributes};
use hotspare_kernel::remote::Call;

use super::error::{ObjectError, ObjectResult};
use super::semaphore_undo;
use crate::capture::shared::SharedTable;

/// Mode bit of a segment that goes when the last process detaches it (`SHM_DEST`).
pub const SEGMENT_REMOVED: u32 = 0o1000;
/// Mode bits that cannot be restored: locked in memory, huge pages.
const SEGMENT_LOCKED: u32 = 0o2000;
const SEGMENT_HUGE: u32 = 0o4000;
/// Bytes a list may have.
const LIST_BYTES_MAX: usize = 1 << 20;

/// A System V shared memory segment; its bytes travel as pages of shared memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Who and what. The inode number of its mappings is `owner.id`, their device that of the
    /// kernel's internal tmpfs.
    pub owner: IpcOwner,
    /// Size.
    pub bytes: u64,
    /// Process that made it; 0 for one that has ended.
    pub creator: GuestPid,
    /// Process that used it last, on this host, attachments, times of the last attach and detach.
    pub last_use: [i64; 4],
}

/// Everything in an ipc namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IpcState {
    /// Semaphores and queues.
    pub ipc: Ipc,
    /// Shared memory.
    pub segments: Vec<Segment>,
}

/// Looks at one ipc namespace, epoch after epoch.
#[derive(Debug)]
pub struct IpcCapture {
    namespace: OwnedFd,
    segments: File,
    semaphores: File,
    queues: File,
    posix: OwnedFd,
    /// Memory of segments by number, and who used each last.
    opened: BTreeMap<i32, (File, LastUse)>,
    /// Times of the last semop(2) and change of each semaphore set, by number.
    stamps: BTreeMap<i32, [i64; 2]>,
    undo: BTreeMap<i32, KnownUndo>,
    /// Segments that we attached in this epoch, and who had used them last before.
    attached: Vec<SegmentUse>,
}

/// Adjustments of a set, as they were found.
#[derive(Debug)]
struct KnownUndo {
    stamp: [i64; 2],
    /// When, in seconds of the day.
    at: i64,
    found: Vec<SemaphoreUndo>,
}

/// Of a segment: process that used it last, attachments, times of the last attach and detach.
type LastUse = [i64; 4];

/// The guest's number of a process, given the host's; 0 for one that has ended or is not of the
/// guest.
pub type GuestPidOf<'a> = &'a (dyn Fn(i32) -> GuestPid + Sync);

/// Runs `work` on a thread inside an ipc namespace.
pub(crate) fn inside<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce() -> ObjectResult<T> + Send,
) -> ObjectResult<T> {
    let done = hotspare_kernel::namespace::on_a_thread(|| {
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWIPC)
            .map_err(|errno| KernelError::from_errno("enter ipc namespace", errno as i32))?;
        work()
    });
    done.map_err(KernelError::io("start a thread"))?
}

fn open_list(name: &str) -> ObjectResult<File> {
    let opened = File::open(format!("/proc/sysvipc/{name}"));
    Ok(opened.map_err(KernelError::io("open list of System V IPC"))?)
}

impl IpcCapture {
    /// For a guest whose ipc namespace is `namespace` (an open `/proc/PID/ns/ipc`).
    pub fn open(namespace: OwnedFd) -> ObjectResult<Self> {
        let lists = || {
            let (segments, semaphores) = (open_list("shm")?, open_list("sem")?);
            Ok((segments, semaphores, open_list("msg")?, ipc::queue_directory()?))
        };
        let (segments, semaphores, queues, posix) = inside(namespace.as_fd(), lists)?;
        let (opened, stamps, undo, attached) = Default::default();
        Ok(Self { namespace, segments, semaphores, queues, posix, opened, stamps, undo, attached })
    }

    /// Lets those who had used segments last before we looked at them be the last again.
    pub fn give_back(&mut self, inside: semaphore_undo::Inside<'_>) -> ObjectResult<()> {
        for SegmentUse { id, last } in self.attached.drain(..) {
            let calls = |_| {
                let arguments = [id as u64, 0, libc::SHM_RDONLY as u64];
                let attach = Call::new(libc::SYS_shmat, &arguments).required();
                vec![attach, Call::new(libc::SYS_shmdt, &[]).chained()]
            };
            inside(last, &[], &calls)?;
        }
        Ok(())
    }

    /// Finds the `SEM_UNDO` adjustments of processes `alive` in the sets of `ipc`, which was just
    /// captured. A set that nobody has changed for seconds is not looked at again.
    pub fn capture_undo(
        &mut self,
        ipc: &mut Ipc,
        alive: &[GuestPid],
        inside: semaphore_undo::Inside<'_>,
    ) -> ObjectResult<()> {
        self.undo.retain(|id, _| ipc.semaphores.iter().any(|set| set.owner.id == *id));
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs() as i64;
        for set in &mut ipc.semaphores {
            let stamp = self.stamps.get(&set.owner.id).copied().unwrap_or_default();
            let known = self.undo.get(&set.owner.id);
            let is_fresh = |known: &&KnownUndo| {
                // The kernel counts in seconds: a later change may have the same stamp.
                known.stamp == stamp && stamp.iter().all(|time| time + 1 < known.at)
            };
            if let Some(known) = known.filter(is_fresh) {
                set.undo.clone_from(&known.found);
                continue;
            }
            let mut found = Vec::new();
            for pid in alive {
                let before = || {
                    let all = known.iter().flat_map(|known| &known.found);
                    all.filter(|undo| undo.process == *pid).copied().collect()
                };
                found.extend(semaphore_undo::find(set, *pid, inside)?.unwrap_or_else(before));
            }
            set.undo.clone_from(&found);
            self.undo.insert(set.owner.id, KnownUndo { stamp, at: now, found });
        }
        Ok(())
    }

    /// Enters what was captured at this stop into `checkpoint`, and segments into the table of
    /// shared memory, which carries their bytes.
    pub fn enter(
        &mut self,
        state: IpcState,
        guest_pid: GuestPidOf<'_>,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        checkpoint.ipc = state.ipc;
        self.opened.retain(|id, _| state.segments.iter().any(|segment| segment.owner.id == *id));
        self.attached.clear();
        for segment in &state.segments {
            let IpcOwner { id, key, mode, uid, gid } = segment.owner;
            if !self.opened.contains_key(&id) {
                let file = inside(self.namespace.as_fd(), || segment_file(id))?;
                self.opened.insert(id, (file, [0; 4]));
                self.attached.push(SegmentUse { id, last: guest_pid(segment.last_use[0] as i32) });
            }
            let Some((file, last_use)) = self.opened.get_mut(&id) else { continue };
            // What was written through an attachment that is gone again, nobody has seen.
            let used = std::mem::replace(last_use, segment.last_use) != segment.last_use;
            let creator = segment.creator;
            let kind = SharedKind::SysV { id, key, mode, uid, gid, creator };
            shared.note_segment(file.as_fd(), kind, used)?;
        }
        Ok(())
    }

    /// What is there, while the guest stands still. It is as before afterwards.
    pub fn capture(&mut self, guest_pid: GuestPidOf<'_>) -> ObjectResult<IpcState> {
        let segments: Vec<Row> = rows(&self.segments)?;
        let semaphores = rows(&self.semaphores)?;
        let queues = rows(&self.queues)?;
        let posix = self.posix_names()?;
        self.stamps = semaphores.iter().map(|row| (row[1] as i32, [row[8], row[9]])).collect();
        let each = segments.iter().map(|row| segment(row, guest_pid));
        let segments = each.collect::<ObjectResult<Vec<_>>>()?;
        let last = |segment: &Segment| SegmentUse {
            id: segment.owner.id,
            last: guest_pid(segment.last_use[0] as i32),
        };
        let used: Vec<SegmentUse> = segments.iter().map(last).collect();
        if semaphores.is_empty() && queues.is_empty() && posix.is_empty() {
            return Ok(IpcState { ipc: Ipc { segments: used, ..Ipc::default() }, segments });
        }
        let directory = self.posix.as_fd();
        let read = || {
            Ok(Ipc {
                semaphores: semaphores
                    .iter()
                    .map(|row| semaphore_set(row, guest_pid))
                    .collect::<ObjectResult<_>>()?,
                message_queues: queues
                    .iter()
                    .map(|row| sysv_queue(row, guest_pid))
                    .collect::<ObjectResult<_>>()?,
                posix_queues: posix
                    .iter()
                    .map(|name| posix_queue(&descriptor_path(directory).join(name), name))
                    .collect::<ObjectResult<_>>()?,
                segments: used,
            })
        };
        Ok(IpcState { ipc: inside(self.namespace.as_fd(), read)?, segments })
    }

    fn posix_names(&self) -> ObjectResult<Vec<String>> {
        let directory = format!("/proc/self/fd/{}", self.posix.as_raw_fd());
        let listed = std::fs::read_dir(directory).and_then(|entries| {
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        });
        let mut names: Vec<String> = listed.map_err(KernelError::io("list message queues"))?;
        names.sort();
        Ok(names)
    }
}

/// A line of a list: its numbers, in the order of proc_sysvipc(5).
type Row = Vec<i64>;

fn rows(list: &File) -> ObjectResult<Vec<Row>> {
    let mut text = vec![0u8; 4096];
    let mut length = 0;
    loop {
        let read = list.read_at(&mut text[length..], length as u64);
        let read = read.map_err(KernelError::io("read list of System V IPC"))?;
        length += read;
        if read == 0 || length >= LIST_BYTES_MAX {
            break;
        }
        if text.len() - length < 4096 {
            text.resize(text.len() * 2, 0);
        }
    }
    let text = String::from_utf8_lossy(&text[..length]);
    let lines = text.lines().skip(1);
    lines
        .map(|line| {
            let numbers = line.split_whitespace().enumerate().map(|(column, word)| match column {
                2 => i64::from_str_radix(word, 8),
                _ => word.parse(),
            });
            let row: Row = numbers
                .collect::<Result<_, _>>()
                .map_err(|_| KernelError::Unexpected(format!("list of System V IPC: {line}")))?;
            if row.len() < 10 {
                return Err(KernelError::Unexpected(format!("System V IPC: {line}")).into());
            }
            Ok(row)
        })
        .collect()
}

fn owner(row: &Row, uid_column: usize) -> IpcOwner {
    IpcOwner {
        key: row[0] as i32,
        id: row[1] as i32,
        mode: row[2] as u32,
        uid: row[uid_column] as u32,
        gid: row[uid_column + 1] as u32,
    }
}

fn segment(row: &Row, guest_pid: GuestPidOf<'_>) -> ObjectResult<Segment> {
    let owner = owner(row, 7);
    if owner.mode & (SEGMENT_LOCKED | SEGMENT_HUGE) != 0 {
        let what = format!("System V shared memory segment {}", owner.id);
        return Err(ObjectError::refused(what, "it is locked in memory or of huge pages"));
    }
    let column = |index: usize| row.get(index).copied().unwrap_or(0);
    let last_use = [5, 6, 11, 12].map(column);
    let creator = guest_pid(row[4] as i32);
    Ok(Segment { owner, bytes: row[3] as u64, creator, last_use })
}

fn semaphore_set(row: &Row, guest_pid: GuestPidOf<'_>) -> ObjectResult<SemaphoreSet> {
    let owner = owner(row, 4);
    let values = ipc::semaphore_values(owner.id, row[3].clamp(0, 1 << 16) as usize)?;
    let values = values.into_iter().enumerate().map(|(index, value)| {
        let last = ipc::semaphore_pid(owner.id, index as i32)?;
        Ok((value, guest_pid(last).0))
    });
    let values = values.collect::<ObjectResult<_>>()?;
    Ok(SemaphoreSet { values, owner, undo: Vec::new() })
}

fn sysv_queue(row: &Row, guest_pid: GuestPidOf<'_>) -> ObjectResult<SysvQueue> {
    let owner = owner(row, 7);
    let capacity_bytes = ipc::queue_capacity(owner.id)?;
    let mut messages = Vec::new();
    // No message is longer than all of them.
    let longest = row[3].max(0) as usize;
    while let Some((kind, bytes)) = ipc::copy_message(owner.id, messages.len() as i64, longest)? {
        messages.push(SysvMessage { kind, bytes });
    }
    let (last_sender, last_receiver) = (guest_pid(row[5] as i32), guest_pid(row[6] as i32));
    Ok(SysvQueue { owner, capacity_bytes, messages, last_sender, last_receiver })
}

/// Where /proc shows a descriptor of ours.
fn descriptor_path(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// What a queue without a name is and holds, seen through `file`, which is open on it.
pub(super) fn unlinked_queue(file: BorrowedFd<'_>, name: &str) -> ObjectResult<PosixQueue> {
    posix_queue(&descriptor_path(file), name)
}

fn posix_queue(path: &Path, name: &str) -> ObjectResult<PosixQueue> {
    let io = |verb| KernelError::io(verb);
    let mut flags = File::options();
    flags.read(true).write(true);
    let open = std::os::unix::fs::OpenOptionsExt::custom_flags(&mut flags, libc::O_NONBLOCK);
    let mut file = open.open(path).map_err(io("open message queue"))?;
    let metadata = file.metadata().map_err(io("look at message queue"))?;
    let attributes = ipc::queue_attributes(file.as_fd())?;
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(io("read message queue's state"))?;
    let watcher = text.split_whitespace().find_map(|word| word.strip_prefix("NOTIFY_PID:"));
    if watcher.is_some_and(|pid| pid != "0") {
        let reason = "a process waits for a notification (mq_notify), and what value it is to get \
            cannot be read; wait in mq_receive, or with poll, instead";
        return Err(ObjectError::refused(format!("POSIX message queue /{name}"), reason));
    }
    let mut messages = Vec::new();
    if attributes.messages > 0 {
        messages = look_through(file.as_fd(), attributes)?;
    }
    Ok(PosixQueue {
        name: format!("/{name}"),
        mode: metadata.mode() & 0o777,
        owner: (metadata.uid(), metadata.gid()),
        limits: (attributes.messages_max, attributes.message_bytes_max),
        messages,
    })
}

/// Takes all messages out and puts them back. What was taken is put back whatever happens.
fn look_through(
    queue: BorrowedFd<'_>,
    attributes: QueueAttributes,
) -> ObjectResult<Vec<PosixMessage>> {
    let capacity = attributes.message_bytes_max.max(0) as usize;
    let mut messages = Vec::new();
    let outcome = loop {
        match ipc::take_posix_message(queue, capacity) {
            Ok(Some((priority, bytes))) => messages.push(PosixMessage { priority, bytes }),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    for message in &messages {
        ipc::send_posix_message(queue, message.priority, &message.bytes)?;
    }
    outcome?;
    Ok(messages)
}

fn ownership(owner: &IpcOwner) -> Ownership {
    Ownership { mode: owner.mode & 0o777, uid: owner.uid, gid: owner.gid }
}

/// Makes the kernel give number `id` to the next object of a kind (`CONFIG_CHECKPOINT_RESTORE`).
fn ask_for_number(kind: &str, id: i32) -> ObjectResult<()> {
    let path = format!("/proc/sys/kernel/{kind}_next_id");
    let written = std::fs::write(path, id.to_string());
    Ok(written.map_err(KernelError::io("choose the number of an IPC object"))?)
}

fn check_number(what: &str, wanted: i32, got: i32) -> ObjectResult<()> {
    if wanted == got {
        return Ok(());
    }
    let text = format!("{what} got number {got} instead of {wanted}");
    Err(KernelError::Unexpected(text).into())
}

/// As [`restore`], in `namespace`, from any thread whose `/proc` is ours.
pub fn restore_in(image: &Ipc, namespace: BorrowedFd<'_>) -> ObjectResult<()> {
    if *image == Ipc::default() {
        return Ok(());
    }
    inside(namespace, || restore(image))
}

/// Makes semaphores and queues in the calling thread's ipc namespace, which has none of them.
/// `/proc` must be writable there.
pub fn restore(image: &Ipc) -> ObjectResult<()> {
    for set in &image.semaphores {
        ask_for_number("sem", set.owner.id)?;
        let count = set.values.len() as i32;
        let id = ipc::create_semaphores(set.owner.key, count, ownership(&set.owner))?;
        check_number("a semaphore set", set.owner.id, id)?;
        let values: Vec<u16> = set.values.iter().map(|(value, _)| *value).collect();
        ipc::set_semaphore_values(id, &values)?;
    }
    for queue in &image.message_queues {
        ask_for_number("msg", queue.owner.id)?;
        let owner = ownership(&queue.owner);
        let id = ipc::create_queue(queue.owner.key, owner, queue.capacity_bytes)?;
        check_number("a message queue", queue.owner.id, id)?;
        for message in &queue.messages {
            ipc::send_message(id, message.kind, &message.bytes)?;
        }
    }
    image.posix_queues.iter().try_for_each(restore_posix_queue)
}

fn restore_posix_queue(image: &PosixQueue) -> ObjectResult<()> {
    make_posix_queue(image).map(drop)
}

/// Makes a queue and fills it; open for reading and writing, without waiting.
pub(super) fn make_posix_queue(image: &PosixQueue) -> ObjectResult<File> {
    let name = image.name.strip_prefix('/').unwrap_or(&image.name);
    let (messages_max, message_bytes_max) = image.limits;
    let attributes = QueueAttributes { messages_max, message_bytes_max, messages: 0 };
    let queue = File::from(ipc::create_posix_queue(name, image.mode, attributes)?);
    for message in &image.messages {
        ipc::send_posix_message(queue.as_fd(), message.priority, &message.bytes)?;
    }
    let mode = std::fs::Permissions::from_mode(image.mode);
    queue.set_permissions(mode).map_err(KernelError::io("set mode of message queue"))?;
    let (uid, gid) = image.owner;
    let owned = std::os::unix::fs::fchown(&queue, Some(uid), Some(gid));
    owned.map_err(KernelError::io("set owner of message queue"))?;
    Ok(queue)
}

/// Makes a segment in the calling thread's ipc namespace. The file is its memory, for reading and
/// writing; mappings of it are not attachments, those are made with shmat(2) in the ghost.
///
/// A segment that is to go with its last process ([`SEGMENT_REMOVED`]) is removed by
/// [`remove_segment`] when the ghost has attached it.
pub fn restore_segment(image: &Segment) -> ObjectResult<File> {
    ask_for_segment(image.owner.id)?;
    let id = ipc::create_segment(image.owner.key, image.bytes, ownership(&image.owner))?;
    adopt_segment(&image.owner, id)
}

/// Makes the next segment of the calling thread's ipc namespace number `id`, whoever makes it.
pub(crate) fn ask_for_segment(id: i32) -> ObjectResult<()> {
    ask_for_number("shm", id)
}

/// Gives the new segment `id` its owner, if it got the right number; its memory as a file.
pub(crate) fn adopt_segment(owner: &IpcOwner, id: i32) -> ObjectResult<File> {
    check_number("a shared memory segment", owner.id, id)?;
    ipc::own_segment(id, ownership(owner))?;
    segment_file(id)
}

/// The memory of a segment of the calling thread's ipc namespace as a file.
pub fn segment_file(id: i32) -> ObjectResult<File> {
    let attached = Attachment::new(id)?;
    let start = format!("{:x}-", attached.address());
    let directory = "/proc/self/map_files";
    let found = std::fs::read_dir(directory).and_then(|entries| {
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&start) {
                return File::options().read(true).write(true).open(entry.path());
            }
        }
        Err(std::io::ErrorKind::NotFound.into())
    });
    Ok(found.map_err(KernelError::io("open segment's memory"))?)
}

/// Marks a segment as removed: it goes with its last attachment.
pub fn remove_segment(id: i32) -> ObjectResult<()> {
    Ok(ipc::remove_segment(id)?)
}
