//! Descriptor tables of the stopped guest: which numbers exist and which open file descriptions
//! they share.
//!
//! # What an epoch costs
//!
//! This runs inside the pause. A look at a descriptor through `/proc` by path costs an open, a
//! read and a close. So `/proc/PID/fdinfo/N` stays open from epoch to epoch: such a file remembers
//! process and number, not the guest's file, so it holds nothing of the guest alive, and reading it
//! again shows what the number means *now*. Whether numbers have appeared is told by the size of
//! `/proc/PID/fd`, which since Linux 6.2 is the number of open descriptors: the directory is read
//! only when the count says so.
//!
//! A process with many TCP sockets is not asked about them one by one: their marks
//! ([`hotspare_kernel::marks`]) tell which descriptors are what they were, and which sockets. Those
//! that do nothing for a while rest ([`super::resting`]) and have no row.
//!
//! Descriptors can only share a description when everything fdinfo says of them is equal; only
//! those candidates are compared with kcmp(2), against one descriptor of each description that was
//! found, by binary search in the kernel's order. That order is remembered, so that in the next
//! epoch one comparison a descriptor confirms it.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use hotspare_image::objects::FileId;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::descriptor::{self, Place};
use hotspare_kernel::marks::{Marks, SocketIdentity, SocketMark, WatchedSockets};
use hotspare_kernel::{HostPid, KernelError};

use super::class::{Class, Known};
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::{self, Header};
use super::resting::{Bed, Dormitory, Resting, Turn};
use super::socket::Rest;

/// A process of the guest, stopped.
#[derive(Clone, Copy, Debug)]
pub struct GuestProcess<'a> {
    /// Its number on the host, or that of any of its threads with `pidfd` of the thread.
    pub host: HostPid,
    /// Its number in the guest.
    pub pid: GuestPid,
    /// A pidfd of it.
    pub pidfd: BorrowedFd<'a>,
}

/// A descriptor as it was just read.
#[derive(Clone, Debug)]
pub struct Row {
    /// Index of its process in the list that was given.
    pub process: usize,
    /// Number.
    pub fd: i32,
    /// First lines of fdinfo.
    pub header: Header,
    /// The other lines: where they lie in [`Rows::text`].
    pub detail: Range<usize>,
    /// Its socket's mark: where it lies in [`Rows::marks`]; empty where it has none.
    pub mark: Range<usize>,
    /// Index of its open file description.
    pub file: usize,
    /// Where its description came in the kernel's order among its like in the last epoch.
    pub rank: u32,
}

/// All descriptors of the guest but those of resting sockets, by process and number.
#[derive(Debug, Default)]
pub struct Rows {
    /// Sorted by process, then number.
    pub rows: Vec<Row>,
    /// What fdinfo said.
    pub text: Vec<u8>,
    /// Marks of sockets.
    pub marks: Vec<u8>,
    /// Sockets that rest no more; whether their options are to be read.
    pub woken: Vec<(Rest, bool)>,
    // Where the rows of each process are.
    ranges: Vec<Range<usize>>,
}

impl Rows {
    /// Descriptor `fd` of process `process`.
    pub fn find(&self, process: usize, fd: i32) -> Option<&Row> {
        let rows = &self.rows[self.ranges[process].clone()];
        rows.binary_search_by_key(&fd, |row| row.fd).ok().map(|at| &rows[at])
    }

    /// Rows of one process.
    pub fn of(&self, process: usize) -> &[Row] {
        &self.rows[self.ranges[process].clone()]
    }

    /// What fdinfo says of a row beyond its header.
    pub fn detail(&self, row: &Row) -> &[u8] {
        &self.text[row.detail.clone()]
    }

    /// The mark of a row's socket; empty where it has none.
    pub fn mark(&self, row: &Row) -> &[u8] {
        &self.marks[row.mark.clone()]
    }
}

/// A descriptor number we have met.
#[derive(Debug)]
pub struct Slot {
    fd: i32,
    // None where we had no descriptor of our own to spare.
    info: Option<File>,
    // Bytes that its fdinfo had: the kernel makes all of the text for each read.
    room: usize,
    /// Name of its description in the last epoch.
    pub file: Option<FileId>,
    /// What it was in the last epoch.
    pub known: Option<Arc<Known>>,
    /// [`Row::rank`] for the next epoch.
    pub rank: u32,
    /// Of a TCP socket: what was read of its descriptor, which was this one.
    socket: Option<(SocketIdentity, Header)>,
    /// If it rests.
    resting: Option<Box<Resting>>,
}

impl Slot {
    fn new(fd: i32) -> Self {
        let (info, file, known, socket, resting) = Default::default();
        Self { fd, info, room: READ_BYTES, file, known, rank: 0, socket, resting }
    }

    /// Lets its socket rest, the only descriptor of which this is, as `make` makes it; whether it
    /// does.
    pub fn lay(
        &mut self,
        inode: u64,
        host: HostPid,
        sleepers: &mut Dormitory,
        make: impl FnOnce(SocketIdentity, FileId) -> Option<Resting>,
    ) -> bool {
        let (Some((identity, _)), Some(file)) = (self.socket, self.file) else { return false };
        if !sleepers.lay(inode, Bed { host, fd: self.fd, file }) {
            return false;
        }
        self.resting = make(identity, file).map(Box::new);
        if self.resting.is_none() {
            sleepers.wake(inode);
        }
        self.resting.is_some()
    }

    fn wake(&mut self, sleepers: &mut Dormitory) -> Option<Rest> {
        let resting = self.resting.take()?;
        sleepers.wake(resting.header.inode);
        Some(resting.rest)
    }

    fn is_socket(&self) -> bool {
        self.known.as_ref().is_some_and(|known| known.class == Class::Socket)
    }
}

/// What we keep of a process between epochs.
#[derive(Debug)]
pub struct KnownTable {
    host: HostPid,
    numbers: OwnedFd,
    infos: OwnedFd,
    // Sorted by number.
    slots: Vec<Slot>,
    // How many of its threads were looked at in this round.
    checked: usize,
    // Where its sockets' marks are seen, once it has many.
    watched: Option<WatchedSockets>,
    // Text of the marks.
    marks: Vec<u8>,
    // Sockets that rested at the last stop, and whose options are read next.
    resting: usize,
    turn: Turn,
}

fn open_directory(path: &str) -> ObjectResult<OwnedFd> {
    let path = CString::new(path).expect("no zero byte in a number");
    Ok(descriptor::open_at(super::working_directory(), &path, libc::O_DIRECTORY)?)
}

impl KnownTable {
    fn new(host: HostPid) -> ObjectResult<Self> {
        let numbers = open_directory(&format!("/proc/{host}/fd"))?;
        let infos = open_directory(&format!("/proc/{host}/fdinfo"))?;
        Ok(Self {
            host,
            numbers,
            infos,
            slots: Vec::new(),
            checked: 0,
            watched: None,
            marks: Vec::new(),
            resting: 0,
            turn: Turn::default(),
        })
    }

    /// `/proc/PID/fd`.
    pub fn numbers(&self) -> BorrowedFd<'_> {
        self.numbers.as_fd()
    }

    /// The slot of number `fd`.
    pub fn slot(&mut self, fd: i32) -> Option<&mut Slot> {
        let at = self.slots.binary_search_by_key(&fd, |slot| slot.fd).ok()?;
        Some(&mut self.slots[at])
    }

    /// Number and socket of each descriptor, in order; no socket where it does not rest.
    pub fn beds(&self) -> impl Iterator<Item = (i32, Option<&Resting>)> {
        self.slots.iter().map(|slot| (slot.fd, slot.resting.as_deref()))
    }

    /// Reads the table into `rows` as process `process`; none rests if all is `exact`.
    fn read(
        &mut self,
        (process, pidfd): (usize, BorrowedFd<'_>),
        exact: bool,
        sleepers: &mut Dormitory,
        rows: &mut Rows,
    ) -> ObjectResult<()> {
        let first = rows.rows.len();
        self.watch(pidfd);
        self.turn.begin(self.resting);
        let Self { host, infos, slots, watched, marks, turn, resting, .. } = self;
        let mut marks = look_at_sockets(watched, marks).into_iter().peekable();
        let mut failure = None;
        *resting = 0;
        slots.retain_mut(|slot| {
            while marks.next_if(|mark| mark.fd < slot.fd).is_some() {}
            let mark = marks.next_if(|mark| mark.fd == slot.fd);
            if let Some(bed) = &slot.resting {
                let same = mark.is_some_and(|mark| bed.has(&mark));
                if same && !exact && !turn.is_of(slot.fd) {
                    *resting += 1;
                    return true;
                }
                rows.woken.extend(slot.wake(sleepers).map(|rest| (rest, same)));
            }
            match read_marked(*host, infos.as_fd(), slot, process, mark.as_ref(), rows) {
                Ok(open) => open,
                Err(error) => {
                    failure.get_or_insert(error);
                    true
                }
            }
        });
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        let open = descriptor::stat(self.numbers.as_fd())?.bytes;
        if open != self.slots.len() as u64 {
            self.read_new(process, first, rows)?;
        }
        rows.ranges.push(first..rows.rows.len());
        Ok(())
    }

    /// From so many TCP sockets on, their marks are looked at.
    fn watch(&mut self, pidfd: BorrowedFd<'_>) {
        const SOCKETS_MIN: usize = 4;
        if self.watched.is_some() {
            return;
        }
        let sockets = self.slots.iter().filter(|slot| slot.is_socket()).count();
        let Some(Ok(marks)) = Marks::loaded().map(|marks| &marks.sockets) else { return };
        if sockets >= SOCKETS_MIN {
            self.watched = marks.watch(&pidfd).ok();
        }
    }

    /// Reads the numbers that have no slot yet.
    fn read_new(&mut self, process: usize, first: usize, rows: &mut Rows) -> ObjectResult<()> {
        let path = format!("/proc/{}/fd", self.host);
        let list = std::fs::read_dir(path).map_err(KernelError::io("list descriptors"))?;
        let known = self.slots.len();
        for entry in list {
            let name = entry.map_err(KernelError::io("list descriptors"))?.file_name();
            let Some(fd) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            if self.slots[..known].binary_search_by_key(&fd, |slot| slot.fd).is_err() {
                self.slots.push(Slot::new(fd));
            }
        }
        let mut fresh = self.slots.split_off(known);
        for slot in &mut fresh {
            read_slot(self.host, self.infos.as_fd(), slot, process, rows)?;
        }
        self.slots.append(&mut fresh);
        self.slots.sort_by_key(|slot| slot.fd);
        rows.rows[first..].sort_by_key(|row| row.fd);
        Ok(())
    }
}

/// Marks of the sockets of a process, by number.
fn look_at_sockets<'a>(
    watched: &mut Option<WatchedSockets>,
    text: &'a mut Vec<u8>,
) -> Vec<SocketMark<'a>> {
    let Some(process) = &watched else { return Vec::new() };
    let Some(Ok(marks)) = Marks::loaded().map(|marks| &marks.sockets) else { return Vec::new() };
    match marks.look(process, text) {
        Ok(seen) => seen,
        Err(error) => {
            tracing::debug!(%error, "marks of sockets cannot be looked at");
            *watched = None;
            Vec::new()
        }
    }
}

/// Reads one descriptor, unless its mark tells that it is what it was; whether it is open.
fn read_marked(
    host: HostPid,
    infos: BorrowedFd<'_>,
    slot: &mut Slot,
    process: usize,
    mark: Option<&SocketMark<'_>>,
    rows: &mut Rows,
) -> Result<bool, KernelError> {
    let start = rows.marks.len();
    let Some(mark) = mark else {
        slot.socket = None;
        return read_slot(host, infos, slot, process, rows);
    };
    rows.marks.extend_from_slice(mark.state);
    let at = start..rows.marks.len();
    let known = slot.socket.filter(|(identity, _)| *identity == mark.identity);
    if let Some((_, header)) = known {
        let detail = rows.text.len()..rows.text.len();
        let (fd, rank, file) = (slot.fd, slot.rank, usize::MAX);
        rows.rows.push(Row { process, fd, header, detail, mark: at, file, rank });
        return Ok(true);
    }
    slot.socket = None;
    let open = read_slot(host, infos, slot, process, rows)?;
    if let Some(row) = rows.rows.last_mut().filter(|_| open) {
        slot.socket = Some((mark.identity, row.header));
        row.mark = at;
    }
    Ok(open)
}

const PIDFD_THREAD: i32 = libc::PIDFD_THREAD as i32;
const READ_BYTES: usize = 1024;

/// Reads one descriptor; whether it is open.
fn read_slot(
    host: HostPid,
    infos: BorrowedFd<'_>,
    slot: &mut Slot,
    process: usize,
    rows: &mut Rows,
) -> Result<bool, KernelError> {
    let opened;
    let file = match &slot.info {
        Some(file) => file,
        None => {
            let name = CString::new(slot.fd.to_string()).expect("digits");
            let file = match descriptor::open_at(infos, &name, 0) {
                Ok(file) => File::from(file),
                Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(false),
                Err(error) => return Err(error),
            };
            // Keep some numbers free for everybody else in this process.
            if descriptor_is_high(&file) {
                opened = file;
                &opened
            } else {
                slot.info.insert(file)
            }
        }
    };
    let start = rows.text.len();
    match read_whole(file, slot.room, &mut rows.text) {
        Ok(room) => slot.room = room,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
            return Err(KernelError::Died(host));
        }
        Err(error) => return Err(KernelError::io("read fdinfo")(error)),
    }
    let (header, at) = fdinfo::parse(&rows.text[start..])
        .map_err(|error| KernelError::Unexpected(error.to_string()))?;
    let detail = start + at..rows.text.len();
    let (fd, rank) = (slot.fd, slot.rank);
    rows.rows.push(Row { process, fd, header, detail, mark: 0..0, file: usize::MAX, rank });
    Ok(true)
}

/// Numbers above this are not kept, so that a guest with very many descriptors does not take all
/// of ours.
const KEPT_MAX: i32 = 16_384;

fn descriptor_is_high(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    file.as_raw_fd() > KEPT_MAX
}

/// Appends the file from its start to `text`. The kernel makes the text anew at each read from 0
/// and hands out no more than asked, so what fits in one read is of one instant.
fn read_whole(file: &File, mut room: usize, text: &mut Vec<u8>) -> std::io::Result<usize> {
    let start = text.len();
    loop {
        text.resize(start + room, 0);
        let bytes = file.read_at(&mut text[start..], 0).inspect_err(|_| text.truncate(start))?;
        if bytes < room {
            text.truncate(start + bytes);
            return Ok(room);
        }
        room *= 4;
    }
}

/// The tables of all processes of a guest, kept between epochs.
#[derive(Debug, Default)]
pub struct Tables {
    processes: HashMap<HostPid, KnownTable>,
    /// Sockets that rest.
    pub sleepers: Dormitory,
}

impl Tables {
    /// The table of a process that [`Tables::read`] has seen.
    pub fn of(&mut self, host: HostPid) -> &mut KnownTable {
        self.processes.get_mut(&host).expect("the process was read")
    }

    /// All sockets that rest.
    pub fn resting(&self) -> impl Iterator<Item = &Resting> {
        let tables = self.processes.values();
        tables.flat_map(KnownTable::beds).filter_map(|(_, resting)| resting)
    }

    /// As [`Tables::of`], for a socket that is to rest.
    pub fn slot_and_sleepers(
        &mut self,
        host: HostPid,
        fd: i32,
    ) -> Option<(&mut Slot, &mut Dormitory)> {
        let slot = self.processes.get_mut(&host)?.slot(fd)?;
        Some((slot, &mut self.sleepers))
    }

    /// Reads the tables of `processes`, which are all the guest has, and forgets all others. If
    /// all is `exact`, no socket rests.
    pub fn read(&mut self, processes: &[GuestProcess<'_>], exact: bool) -> ObjectResult<Rows> {
        let known = self.processes.len();
        self.processes.retain(|host, _| processes.iter().any(|process| process.host == *host));
        if self.processes.len() != known {
            self.sleepers.retain(|host| self.processes.contains_key(&host));
        }
        self.refuse_shared_tables(processes)?;
        let mut rows = self.read_all(processes, exact)?;
        // Somebody else has got a descriptor of a socket that rests.
        while self.wake_shared(&mut rows) {
            let woken = std::mem::take(&mut rows.woken);
            rows = self.read_all(processes, exact)?;
            rows.woken.extend(woken);
        }
        Ok(rows)
    }

    fn read_all(&mut self, processes: &[GuestProcess<'_>], exact: bool) -> ObjectResult<Rows> {
        let Self { processes: tables, sleepers } = self;
        let mut rows = Rows::default();
        for (index, process) in processes.iter().enumerate() {
            let start = (rows.rows.len(), rows.text.len(), rows.marks.len());
            let table = match tables.entry(process.host) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(KnownTable::new(process.host)?)
                }
            };
            if table.read((index, process.pidfd), exact, sleepers, &mut rows).is_err() {
                // Another process may have the number now: look again with nothing remembered.
                rows.rows.truncate(start.0);
                rows.text.truncate(start.1);
                rows.marks.truncate(start.2);
                sleepers.retain(|host| host != process.host);
                *table = KnownTable::new(process.host)?;
                table.read((index, process.pidfd), exact, sleepers, &mut rows)?;
            }
        }
        Ok(rows)
    }

    /// Wakes sockets of which another descriptor was read; whether there are any.
    fn wake_shared(&mut self, rows: &mut Rows) -> bool {
        if self.sleepers.is_empty() {
            return false;
        }
        let Self { processes, sleepers } = self;
        let before = rows.woken.len();
        for row in &rows.rows {
            let Some(bed) = sleepers.find(row.header.inode) else { continue };
            let slot = processes.get_mut(&bed.host).and_then(|table| table.slot(bed.fd));
            let rest = slot.and_then(|slot| slot.wake(sleepers));
            rows.woken.extend(rest.map(|rest| (rest, false)));
        }
        rows.woken.len() != before
    }
}

/// A thread that stands for its process, and a pidfd of it.
pub type StandIn = (HostPid, OwnedFd);

impl Tables {
    /// A thread to look through where the leader of `process` has ended while others go on: the
    /// kernel shows no descriptors of an ended thread, and takes none from it.
    pub fn stand_in(&self, process: &GuestProcess<'_>) -> ObjectResult<Option<StandIn>> {
        let host = process.host;
        let open = match self.processes.get(&host) {
            Some(table) => descriptor::stat(table.numbers())?,
            None => {
                let path = CString::new(format!("/proc/{host}/fd")).expect("digits");
                descriptor::stat_at(super::working_directory(), &path, false)?
            }
        };
        if open.bytes != 0 {
            return Ok(None);
        }
        let threads = format!("/proc/{host}/task");
        let threads = std::fs::read_dir(threads).map_err(KernelError::io("list threads"))?;
        for thread in threads {
            let name = thread.map_err(KernelError::io("list threads"))?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let thread = HostPid(thread);
            let path = CString::new(format!("/proc/{thread}/fd")).expect("digits");
            let open = descriptor::stat_at(super::working_directory(), &path, false);
            if thread != host && open.is_ok_and(|open| open.bytes != 0) {
                return Ok(Some((thread, descriptor::pidfd(thread, PIDFD_THREAD)?)));
            }
        }
        Ok(None)
    }

    /// Refuses processes that share one table (`CLONE_FILES` without `CLONE_THREAD`): the image has
    /// a table for each. Only new processes are looked at, since tables are shared from birth.
    fn refuse_shared_tables(&self, processes: &[GuestProcess<'_>]) -> ObjectResult<()> {
        let is_new = |process: &&GuestProcess<'_>| !self.processes.contains_key(&process.host);
        for new in processes.iter().filter(is_new) {
            for other in processes.iter().filter(|other| other.host != new.host) {
                if descriptor::compare_tables(new.host, other.host)?.is_eq() {
                    let what = format!("process {}", new.pid);
                    let reason = format!(
                        "it shares its descriptor table with process {} (clone with CLONE_FILES)",
                        other.pid
                    );
                    return Err(ObjectError::refused(what, reason));
                }
            }
        }
        Ok(())
    }

    /// Refuses a thread that left its process's table (`unshare(CLONE_FILES)`): its descriptors
    /// would be lost without a word. A thread can do so at any time, and a look costs a
    /// microsecond; so each call looks at a few `threads` and goes on with others next time.
    pub fn check_threads(
        &mut self,
        process: &GuestProcess<'_>,
        threads: &[HostPid],
    ) -> ObjectResult<()> {
        const AT_ONCE: usize = 8;
        let Some(table) = self.processes.get_mut(&process.host) else { return Ok(()) };
        let begin = if table.checked < threads.len() { table.checked } else { 0 };
        let end = threads.len().min(begin + AT_ONCE);
        table.checked = end;
        for thread in &threads[begin..end] {
            if !descriptor::compare_tables(process.host, *thread)?.is_eq() {
                let what = format!("a thread of process {}", process.pid);
                let reason = "it has a descriptor table of its own (unshare with CLONE_FILES)";
                return Err(ObjectError::refused(what, reason));
            }
        }
        Ok(())
    }
}

/// What descriptors of one description have in common.
pub type Key = (i32, u64, u32, u64, u64);

/// The [`Key`] of a header and its detail.
pub fn key(header: &Header, detail: &[u8]) -> Key {
    let told = fdinfo::discriminator(detail);
    (header.mount, header.inode, header.flags, header.position, told)
}

/// Finds which rows share a description: fills in [`Row::file`] and returns the rows of each
/// description, the first in order of process and number at the front.
pub fn share(rows: &mut Rows, processes: &[GuestProcess<'_>]) -> ObjectResult<Vec<Vec<usize>>> {
    let mut order: Vec<(Key, u32, usize)> = rows
        .rows
        .iter()
        .enumerate()
        .map(|(index, row)| (key(&row.header, rows.detail(row)), row.rank, index))
        .collect();
    order.sort_unstable();
    let mut files: Vec<Vec<usize>> = Vec::with_capacity(order.len());
    for candidates in order.chunk_by(|one, other| one.0 == other.0) {
        // Indices into `files`, in the kernel's order of descriptions.
        let mut found: Vec<usize> = Vec::with_capacity(candidates.len());
        for &(_, _, index) in candidates {
            let place = |row: usize| -> Place {
                (processes[rows.rows[row].process].host, rows.rows[row].fd)
            };
            let position = search(&found, |file| {
                descriptor::compare_files(place(files[file][0]), place(index))
            })?;
            match position {
                Ok(at) => files[found[at]].push(index),
                Err(at) => {
                    found.insert(at, files.len());
                    files.push(vec![index]);
                }
            }
        }
        for (rank, &file) in found.iter().enumerate() {
            for &row in &files[file] {
                rows.rows[row].rank = rank as u32;
            }
        }
    }
    for members in &mut files {
        members.sort_unstable();
    }
    files.sort_unstable_by_key(|members| members[0]);
    for (file, members) in files.iter().enumerate() {
        for &row in members {
            rows.rows[row].file = file;
        }
    }
    Ok(files)
}

/// Binary search with a comparison that can fail; the end is tried first.
fn search(
    found: &[usize],
    mut compare: impl FnMut(usize) -> Result<Ordering, KernelError>,
) -> ObjectResult<Result<usize, usize>> {
    let (mut low, mut high) = (0, found.len());
    let mut middle = high.saturating_sub(1);
    while low < high {
        match compare(found[middle])? {
            Ordering::Equal => return Ok(Ok(middle)),
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
        }
        middle = low + (high - low) / 2;
    }
    Ok(Err(low))
}
