//! Taking all descriptors of the stopped guest.
//!
//! Road: read the tables, find what is shared ([`super::table`]), say what each open file
//! description is ([`super::class`]), take its image, then what concerns several of them: sockets,
//! whose queues may hold further files; the contents of pipes; what epoll instances watch.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use hotspare_image::memory::{SharedId, SharedKind};
use hotspare_image::objects::{
    Descriptor, EpollWatch, FileId, FileLock, FileOwner, Object, OpenFile,
};
use hotspare_image::tree::{GuestPid, HostPath};
use hotspare_kernel::descriptor::{self, FileStat, Place};
use hotspare_kernel::{HostPid, pidfd as kernel_pidfd};

use super::class::{Class, Known, Subject, classify};
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::{self, Header};
use super::inotify::WatchPaths;
use super::outside::OutsideDescriptor;
use super::patience::Patience;
use super::resting::Resting;
use super::rules::FileRules;
use super::socket::{self, SocketCapture};
use super::table::{self, GuestProcess, Rows, StandIn, Tables};
use super::unix::GuestView;
use super::{
    device, directory, epoll, eventfd, inotify, memfd, mqueue, outside, pidfd, pipe, proc_file,
    regular, signalfd, timerfd,
};

/// A memfd that is open in the guest, for whoever carries its bytes.
#[derive(Debug)]
pub struct MemfdSeen {
    /// Its name.
    pub object: SharedId,
    /// What made it.
    pub kind: SharedKind,
    /// Size.
    pub bytes: u64,
    /// A descriptor of it: process and number on the host.
    pub place: Place,
    /// For one that is open in a socket's queue only, that descriptor, which is ours.
    pub ours: Option<OwnedFd>,
}

/// Names shared memory by device and inode number: equal names in all checkpoints of a guest.
pub type NameShared<'a> = &'a mut dyn FnMut((u32, u32), u64) -> SharedId;

/// The guest's descriptors at one instant.
#[derive(Debug, Default)]
pub struct Captured {
    /// Open file descriptions.
    pub files: Vec<OpenFile>,
    /// The table of each process, in the order in which the processes were given.
    pub tables: Vec<Vec<Descriptor>>,
    /// Memory behind descriptors; one entry for each object.
    pub memfds: Vec<MemfdSeen>,
}

/// Captures the descriptors of one guest, epoch after epoch.
#[derive(Debug)]
pub struct DescriptorCapture {
    rules: FileRules,
    outside: Vec<OutsideDescriptor>,
    tables: Tables,
    scratch: pipe::Scratch,
    paths: WatchPaths,
    unread_events: Patience,
    watches: epoll::Memory,
    next_id: u32,
}

impl DescriptorCapture {
    /// For a guest that was started with `outside` as its standard descriptors.
    pub fn new(rules: FileRules, outside: Vec<OutsideDescriptor>) -> Self {
        let (tables, scratch, paths, unread_events, watches) = Default::default();
        Self { rules, outside, tables, scratch, paths, unread_events, watches, next_id: 0 }
    }

    /// The open files that the last capture left out, because nothing had happened to them
    /// ([`super::resting`]). They stay the same until the next one, so the guest may run.
    pub fn resting_files(&self) -> impl Iterator<Item = OpenFile> {
        self.tables.resting().map(Resting::open_file)
    }

    /// Looks whether some of the `threads` of a captured process left its descriptor table, which
    /// is refused. To be called at each stop; goes through all threads in a few epochs.
    pub fn check_threads(
        &mut self,
        process: &GuestProcess<'_>,
        threads: &[HostPid],
    ) -> ObjectResult<()> {
        self.tables.check_threads(process, threads)
    }

    /// Takes the descriptors of `processes`: all of the guest, all stopped. Duplicates that are
    /// made are closed on return. A description that is met again keeps its [`FileId`]. The files
    /// of sockets that rest are missing: see [`DescriptorCapture::resting_files`].
    ///
    /// On failure the guest is as before; the next call starts afresh.
    pub fn capture(
        &mut self,
        processes: &[GuestProcess<'_>],
        sockets: &mut SocketCapture,
        name_shared: NameShared<'_>,
    ) -> ObjectResult<Captured> {
        sockets.begin_epoch();
        self.unread_events.begin_attempt();
        let stand_ins = self.stand_ins(processes)?;
        let processes = &through(processes, &stand_ins);
        let (mut session, members) = Session::begin(self, processes, sockets)?;
        session.name_all(members, &mut Err)?;
        session.take_all(name_shared, &mut Err)?;
        session.take_sockets(sockets, name_shared, &mut Err)?;
        session.fill_pipes()?;
        session.resolve_watches()?;
        let mut captured = session.finish(sockets);
        socket::settle(&mut captured.files)?;
        Ok(captured)
    }
}

impl DescriptorCapture {
    /// All reasons why the descriptors of `processes` cannot be captured, whichever process has
    /// them; none if they can. The processes need not be stopped: then what changes meanwhile may
    /// be missed or appear as an error.
    pub fn obstacles(
        &mut self,
        processes: &[GuestProcess<'_>],
        sockets: &mut SocketCapture,
    ) -> ObjectResult<Vec<ObjectError>> {
        sockets.begin_epoch();
        let mut found = Vec::new();
        let mut note = |error: ObjectError| {
            if !error.is_transient() {
                found.push(error);
            }
            Ok(())
        };
        let name_shared: NameShared<'_> = &mut |_, inode| SharedId(inode);
        let stand_ins = self.stand_ins(processes)?;
        let processes = &through(processes, &stand_ins);
        let (mut session, members) = Session::begin(self, processes, sockets)?;
        session.name_all(members, &mut note)?;
        session.take_all(name_shared, &mut note)?;
        session.take_sockets(sockets, name_shared, &mut note)?;
        let mut captured = session.finish_files();
        if let Err(error) = socket::settle(&mut captured) {
            found.push(error);
        }
        Ok(found)
    }
}

impl DescriptorCapture {
    fn stand_ins(&self, processes: &[GuestProcess<'_>]) -> ObjectResult<Vec<Option<StandIn>>> {
        processes.iter().map(|process| self.tables.stand_in(process)).collect()
    }
}

/// The processes as they are looked at.
fn through<'a>(
    processes: &[GuestProcess<'a>],
    stand_ins: &'a [Option<StandIn>],
) -> Vec<GuestProcess<'a>> {
    let each = processes.iter().zip(stand_ins).map(|(process, stand_in)| match stand_in {
        Some((host, pidfd)) => GuestProcess { host: *host, pidfd: pidfd.as_fd(), ..*process },
        None => *process,
    });
    each.collect()
}

/// An open file description.
struct Seen {
    id: FileId,
    header: Header,
    // Indices of rows; none for one that was found in a queue.
    members: Vec<usize>,
    // One found in a queue: our descriptor of it and its detail.
    found: Option<(OwnedFd, Vec<u8>)>,
    known: Arc<Known>,
}

/// A duplicate, or the one we have anyway.
enum Duplicate<'a> {
    Made(OwnedFd),
    Had(BorrowedFd<'a>),
}

impl AsFd for Duplicate<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Made(file) => file.as_fd(),
            Self::Had(file) => *file,
        }
    }
}

struct Session<'a> {
    kept: &'a mut DescriptorCapture,
    processes: &'a [GuestProcess<'a>],
    rows: Rows,
    seen: Vec<Seen>,
    // Parallel to `seen` as far as captured; sockets stay None until they are taken.
    objects: Vec<Option<(FileOwner, Object)>>,
    memfds: Vec<MemfdSeen>,
    queues: mqueue::Taken,
    // Descriptions by what their descriptors have in common, for those found in queues.
    index: Option<HashMap<table::Key, Vec<usize>>>,
    // Sockets that are as they were, and who gets their signals.
    calm: Vec<(usize, FileOwner)>,
}

/// What to do about an error: give up with it, or note it and go on.
type OnError<'a> = &'a mut dyn FnMut(ObjectError) -> ObjectResult<()>;

impl<'a> Session<'a> {
    /// Reads the tables; also the rows of each description.
    fn begin(
        kept: &'a mut DescriptorCapture,
        processes: &'a [GuestProcess<'a>],
        sockets: &mut SocketCapture,
    ) -> ObjectResult<(Self, Vec<Vec<usize>>)> {
        let mut rows = kept.tables.read(processes, sockets.is_exact())?;
        rows.woken.drain(..).for_each(|(rest, due)| sockets.wake(rest, due));
        let members = table::share(&mut rows, processes)?;
        let seen = Vec::with_capacity(members.len());
        let (objects, memfds, queues, index, calm) = Default::default();
        Ok((Self { kept, processes, rows, seen, objects, memfds, queues, index, calm }, members))
    }

    /// Gives each description a name and says what it is.
    fn name_all(&mut self, members: Vec<Vec<usize>>, on_error: OnError<'_>) -> ObjectResult<()> {
        let mut taken = std::collections::HashSet::with_capacity(members.len());
        let mut unnamed = Vec::new();
        for rows in members {
            let first = &self.rows.rows[rows[0]];
            let (process, fd) = (first.process, first.fd);
            let known = match self.classify_row(rows[0]) {
                Ok(known) => known,
                Err(error) => {
                    on_error(error.at(self.processes[process].pid, fd))?;
                    continue;
                }
            };
            let mut id = None;
            for &row in &rows {
                let row = &self.rows.rows[row];
                let host = self.processes[row.process].host;
                let before = self.kept.tables.of(host).slot(row.fd).and_then(|slot| slot.file);
                if id.is_none() {
                    id = before.filter(|id| taken.insert(*id));
                }
            }
            if id.is_none() {
                unnamed.push(self.seen.len());
            }
            let header = self.rows.rows[rows[0]].header;
            let id = id.unwrap_or_default();
            self.seen.push(Seen { id, header, members: rows, found: None, known });
        }
        for index in unnamed {
            self.seen[index].id = self.kept.fresh_id(&taken);
        }
        self.remember();
        Ok(())
    }

    fn classify_row(&mut self, row: usize) -> ObjectResult<Arc<Known>> {
        let row = &self.rows.rows[row];
        let process = self.processes[row.process];
        let table = self.kept.tables.of(process.host);
        let before = table.slot(row.fd).and_then(|slot| slot.known.take());
        let subject = Subject {
            numbers: table.numbers(),
            fd: row.fd,
            header: &row.header,
            detail: self.rows.detail(row),
            duplicate: &|| Ok(kernel_pidfd::get_fd(process.pidfd, row.fd)?),
        };
        classify(&subject, before.as_ref())
    }

    /// Notes names and kinds for the next epoch.
    fn remember(&mut self) {
        for seen in &self.seen {
            for (nth, &row) in seen.members.iter().enumerate() {
                let row = &self.rows.rows[row];
                let host = self.processes[row.process].host;
                if let Some(slot) = self.kept.tables.of(host).slot(row.fd) {
                    slot.file = Some(seen.id);
                    slot.rank = row.rank;
                    slot.known = (nth == 0).then(|| seen.known.clone());
                }
            }
        }
    }

    /// A descriptor of the description.
    fn place(&self, index: usize) -> Place {
        let seen = &self.seen[index];
        match &seen.found {
            Some((file, _)) => (super::own_pid(), file.as_raw_fd()),
            None => {
                let row = &self.rows.rows[seen.members[0]];
                (self.processes[row.process].host, row.fd)
            }
        }
    }

    /// The same for messages; process 0 for one found in a queue.
    fn holder(&self, index: usize) -> (GuestPid, i32) {
        match self.seen[index].members.first() {
            Some(&row) => {
                let row = &self.rows.rows[row];
                (self.processes[row.process].pid, row.fd)
            }
            None => (GuestPid(0), -1),
        }
    }

    fn duplicate(&self, index: usize) -> ObjectResult<Duplicate<'_>> {
        let seen = &self.seen[index];
        match &seen.found {
            Some((file, _)) => Ok(Duplicate::Had(file.as_fd())),
            None => {
                let row = &self.rows.rows[seen.members[0]];
                let file = kernel_pidfd::get_fd(self.processes[row.process].pidfd, row.fd)?;
                Ok(Duplicate::Made(file))
            }
        }
    }

    fn owned_duplicate(&self, index: usize) -> ObjectResult<OwnedFd> {
        match self.duplicate(index)? {
            Duplicate::Made(file) => Ok(file),
            Duplicate::Had(file) => Ok(file
                .try_clone_to_owned()
                .map_err(hotspare_kernel::KernelError::io("duplicate descriptor"))?),
        }
    }

    fn detail(&self, index: usize) -> &[u8] {
        let seen = &self.seen[index];
        match &seen.found {
            Some((_, detail)) => detail,
            None => self.rows.detail(&self.rows.rows[seen.members[0]]),
        }
    }

    /// The mark of a socket; empty where it has none.
    fn mark(&self, index: usize) -> &[u8] {
        let row = self.seen[index].members.first();
        row.map_or(&[], |row| self.rows.mark(&self.rows.rows[*row]))
    }

    /// Captures all descriptions that have no object yet, except sockets.
    fn take_all(&mut self, name_shared: NameShared<'_>, on_error: OnError<'_>) -> ObjectResult<()> {
        while self.objects.len() < self.seen.len() {
            let index = self.objects.len();
            let (pid, fd) = self.holder(index);
            let taken = match self.take(index, name_shared) {
                Ok(taken) => taken,
                Err(error) => {
                    on_error(error.at(pid, fd))?;
                    None
                }
            };
            self.objects.push(taken);
        }
        Ok(())
    }

    /// Owner and image of one description; none for a socket.
    fn take(
        &mut self,
        index: usize,
        name_shared: NameShared<'_>,
    ) -> ObjectResult<Option<(FileOwner, Object)>> {
        if let Some(image) = self.outside(index)? {
            return Ok(Some((FileOwner::default(), Object::Outside(image))));
        }
        let object = match self.seen[index].known.class {
            Class::Socket => return Ok(None),
            Class::Pipe | Class::Fifo => {
                let seen = &self.seen[index];
                let end = self.duplicate(index)?;
                let rules = &self.kept.rules;
                let image = pipe::capture(&seen.known, &seen.header, end.as_fd(), rules)?;
                return Ok(Some((self.owner(end.as_fd())?, Object::Pipe(image))));
            }
            Class::Inotify => {
                let host = self.place(index).0;
                let file = self.owned_duplicate(index)?;
                let mut paths = std::mem::take(&mut self.kept.paths);
                let mut patience = self.kept.unread_events;
                let detail = self.detail(index);
                let image = inotify::capture(detail, file.as_fd(), host, &mut paths, &mut patience);
                (self.kept.paths, self.kept.unread_events) = (paths, patience);
                return Ok(Some((self.owner(file.as_fd())?, Object::Inotify(image?))));
            }
            Class::Memfd => Object::Memfd(self.take_memfd(index, name_shared)?),
            Class::TimerFd => {
                let again = || self.read_detail(index);
                let duplicate = || self.owned_duplicate(index);
                Object::TimerFd(timerfd::capture(self.detail(index), duplicate, again)?)
            }
            Class::Regular => {
                let locks = self.locks(index)?;
                let seen = &self.seen[index];
                let rules = &self.kept.rules;
                Object::Regular(regular::capture(&seen.known, &seen.header, locks, rules)?)
            }
            Class::MessageQueue => {
                let mut queues = std::mem::take(&mut self.queues);
                let (seen, file) = (&self.seen[index], || self.owned_duplicate(index));
                let image = mqueue::capture(&seen.known, seen.header.inode, file, &mut queues);
                self.queues = queues;
                Object::MessageQueue(image?)
            }
            class => self.take_simple(index, class)?,
        };
        Ok(Some((FileOwner::default(), object)))
    }

    /// Kinds whose image is in what was read already.
    fn take_simple(&self, index: usize, class: Class) -> ObjectResult<Object> {
        let seen = &self.seen[index];
        let (known, position) = (&seen.known, seen.header.position);
        let detail = self.detail(index);
        Ok(match class {
            Class::Directory => Object::Directory(directory::capture(known, position)?),
            Class::EventFd => Object::EventFd(eventfd::capture(detail)?),
            // The watches come when all files have names.
            Class::Epoll => Object::Epoll(hotspare_image::objects::Epoll { watches: Vec::new() }),
            Class::SignalFd => Object::SignalFd(signalfd::capture(detail)?),
            Class::PidFd => Object::PidFd(pidfd::capture(detail)?),
            Class::Device(device) => Object::Device(device::capture(device)),
            Class::Proc => {
                let duplicate = || self.owned_duplicate(index);
                Object::Proc(proc_file::capture(known, position, duplicate)?)
            }
            Class::Terminal
            | Class::Regular
            | Class::Pipe
            | Class::Fifo
            | Class::TimerFd
            | Class::Inotify
            | Class::Memfd
            | Class::MessageQueue
            | Class::Socket => unreachable!("{class:?} is taken elsewhere"),
        })
    }

    fn outside(&self, index: usize) -> ObjectResult<Option<hotspare_image::objects::OutsideFile>> {
        let seen = &self.seen[index];
        let stat =
            || -> ObjectResult<FileStat> { Ok(descriptor::stat(self.duplicate(index)?.as_fd())?) };
        let place = self.place(index);
        outside::capture(&self.kept.outside, seen.known.class, &seen.header, place, stat)
    }

    fn take_memfd(
        &mut self,
        index: usize,
        name_shared: NameShared<'_>,
    ) -> ObjectResult<hotspare_image::objects::MemfdFile> {
        let file = self.duplicate(index)?;
        let stat = descriptor::stat(file.as_fd())?;
        let object = name_shared(stat.device, stat.inode);
        let seen = &self.seen[index];
        let image = memfd::capture(object, seen.header.position);
        if !self.memfds.iter().any(|known| known.object == object) {
            let (kind, bytes) = memfd::memory(&seen.known, file.as_fd())?;
            let ours = match &file {
                Duplicate::Made(_) => None,
                Duplicate::Had(_) => Some(self.owned_duplicate(index)?),
            };
            let own_place = |file: &OwnedFd| (super::own_pid(), file.as_raw_fd());
            let place = ours.as_ref().map_or_else(|| self.place(index), own_place);
            drop(file);
            self.memfds.push(MemfdSeen { object, kind, bytes, place, ours });
        }
        Ok(image)
    }

    /// The detail as it is now.
    fn read_detail(&self, index: usize) -> ObjectResult<Vec<u8>> {
        let (host, fd) = self.place(index);
        let text = std::fs::read(format!("/proc/{host}/fdinfo/{fd}"))
            .map_err(hotspare_kernel::KernelError::io("read fdinfo"))?;
        let (_, at) = fdinfo::parse(&text)?;
        Ok(text[at..].to_vec())
    }

    /// Locks that any holder of the description shows.
    fn locks(&self, index: usize) -> ObjectResult<Vec<FileLock>> {
        let mut locks: Vec<FileLock> = Vec::new();
        for &row in &self.seen[index].members {
            let row = &self.rows.rows[row];
            let pid = self.processes[row.process].pid;
            for lock in fdinfo::locks(self.rows.detail(row), pid)? {
                if !locks.contains(&lock) {
                    locks.push(lock);
                }
            }
        }
        Ok(locks)
    }

    /// Who gets the file's signals.
    fn owner(&self, file: BorrowedFd<'_>) -> ObjectResult<FileOwner> {
        let (kind, number, signal) = descriptor::signal_owner(file)?;
        if number == 0 {
            return Ok(FileOwner { kind: 0, number: GuestPid(0), signal });
        }
        let host = HostPid(number);
        let of_guest = self.processes.iter().find(|process| process.host == host);
        let number = match of_guest {
            Some(process) => process.pid,
            None => guest_number(host)?,
        };
        Ok(FileOwner { kind, number, signal })
    }

    /// Captures sockets, and what is found in their queues, until there is nothing new.
    fn take_sockets(
        &mut self,
        sockets: &mut SocketCapture,
        name_shared: NameShared<'_>,
        on_error: OnError<'_>,
    ) -> ObjectResult<()> {
        let guest = View { processes: self.processes };
        let mut index = 0;
        while index < self.seen.len() {
            let socket = self.seen[index].known.class == Class::Socket;
            if socket && self.objects[index].is_none() {
                let (pid, fd) = self.holder(index);
                match self.take_socket(index, sockets, &guest) {
                    Ok(taken) => self.objects[index] = Some(taken),
                    Err(error) => on_error(error.at(pid, fd))?,
                }
                self.take_all(name_shared, on_error)?;
            }
            index += 1;
        }
        Ok(())
    }

    fn take_socket(
        &mut self,
        index: usize,
        sockets: &mut SocketCapture,
        guest: &dyn GuestView,
    ) -> ObjectResult<(FileOwner, Object)> {
        let Header { inode, flags, .. } = self.seen[index].header;
        if let Some(same) = sockets.same(inode, flags, self.mark(index)) {
            self.calm.push((index, same.0));
            return Ok(same);
        }
        let socket = self.owned_duplicate(index)?;
        let in_flight = &mut |file| self.name(file);
        let image = sockets.capture(socket.as_fd(), inode, guest, in_flight)?;
        let owner = sockets.owner(inode, flags, || self.owner(socket.as_fd()))?;
        sockets.note(inode, self.mark(index), &image);
        Ok((owner, image))
    }

    /// Adds the contents of each pipe to the end with the lowest name.
    fn fill_pipes(&mut self) -> ObjectResult<()> {
        // For each pipe: who gets the contents, who can read them.
        let mut pipes: HashMap<u64, (usize, Option<usize>)> = HashMap::new();
        for index in 0..self.seen.len() {
            let Some((_, Object::Pipe(image))) = &self.objects[index] else { continue };
            let reads = pipe::reads(self.seen[index].header.flags);
            let entry = pipes.entry(image.pipe).or_insert((index, None));
            if self.seen[index].id < self.seen[entry.0].id {
                entry.0 = index;
            }
            entry.1 = entry.1.or(reads.then_some(index));
        }
        for (keeper, reader) in pipes.into_values() {
            let Some(reader) = reader else { continue };
            let Some((_, Object::Pipe(image))) = &self.objects[keeper] else { continue };
            let capacity = image.capacity_bytes;
            let packets = self.has_packets(image.pipe);
            let mut scratch = std::mem::take(&mut self.kept.scratch);
            let contents = self
                .duplicate(reader)
                .and_then(|end| pipe::contents(end.as_fd(), capacity, packets, &mut scratch));
            self.kept.scratch = scratch;
            if let Some((_, Object::Pipe(image))) = &mut self.objects[keeper] {
                image.contents = contents?;
            }
        }
        Ok(())
    }

    fn has_packets(&self, pipe: u64) -> bool {
        self.seen.iter().any(|seen| {
            let class = matches!(seen.known.class, Class::Pipe | Class::Fifo);
            let direct = seen.header.flags & libc::O_DIRECT as u32 != 0;
            class && seen.header.inode == pipe && direct
        })
    }

    /// Finds what epoll instances watch.
    fn resolve_watches(&mut self) -> ObjectResult<()> {
        let instances: Vec<usize> = (0..self.seen.len())
            .filter(|&index| matches!(self.objects[index], Some((_, Object::Epoll(_)))))
            .collect();
        if instances.is_empty() {
            return Ok(());
        }
        let mut by_inode: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, seen) in self.seen.iter().enumerate() {
            by_inode.entry(seen.header.inode).or_default().push(index);
        }
        let mut memory = std::mem::take(&mut self.kept.watches);
        memory.begin_epoch();
        for instance in instances {
            let (pid, fd) = self.holder(instance);
            let mut holders = vec![false; self.processes.len()];
            for &row in &self.seen[instance].members {
                holders[self.rows.rows[row].process] = true;
            }
            let lines = memory.lines(self.seen[instance].id, self.detail(instance));
            let lines = lines.map_err(|error| error.at(pid, fd))?;
            let mut watches = Vec::with_capacity(lines.len());
            for line in lines {
                let watch = self.resolve(instance, &holders, line, &by_inode);
                watches.push(watch.map_err(|error| error.at(pid, fd))?);
            }
            if let Some((_, Object::Epoll(image))) = &mut self.objects[instance] {
                image.watches = watches;
            }
        }
        self.kept.watches = memory;
        Ok(())
    }

    fn resolve(
        &self,
        instance: usize,
        holders: &[bool],
        line: &epoll::Line,
        by_inode: &HashMap<u64, Vec<usize>>,
    ) -> ObjectResult<EpollWatch> {
        if let Some(bed) = self.kept.tables.sleepers.find(line.inode) {
            let mut each = self.processes.iter().zip(holders);
            let holds = each.find(|(process, _)| process.host == bed.host);
            let named = holds.filter(|(_, holds)| **holds && bed.fd == line.fd);
            return epoll::watch(line, Some(bed.file), named.map(|(process, _)| process.pid));
        }
        let all = by_inode.get(&line.inode).map(Vec::as_slice).unwrap_or_default();
        // Most likely the number still means what it meant.
        let at_number = (0..self.processes.len())
            .filter_map(|process| self.rows.find(process, line.fd).map(|row| row.file))
            .filter(|file| all.contains(file));
        let candidates = at_number.chain(all.iter().copied()).map(|index| epoll::Candidate {
            file: self.seen[index].id,
            place: self.place(index),
            only: all.len() == 1,
        });
        let found = epoll::resolve(line, self.place(instance), candidates)?;
        let process = (0..self.processes.len()).find(|&process| {
            let row = self.rows.find(process, line.fd);
            holders[process] && row.is_some_and(|row| Some(self.seen[row.file].id) == found)
        });
        epoll::watch(line, found, process.map(|process| self.processes[process].pid))
    }

    fn finish_files(&mut self) -> Vec<OpenFile> {
        let objects = std::mem::take(&mut self.objects);
        let files = self.seen.iter().zip(objects).filter_map(|(seen, taken)| {
            let (owner, object) = taken?;
            Some(OpenFile { id: seen.id, flags: seen.header.flags, owner, object })
        });
        files.collect()
    }

    fn finish(mut self, sockets: &mut SocketCapture) -> Captured {
        self.let_rest(sockets);
        let files = self.finish_files();
        let mut tables = Vec::with_capacity(self.processes.len());
        for (process, of) in self.processes.iter().enumerate() {
            let mut rows = self.rows.of(process).iter().peekable();
            let mut table = Vec::with_capacity(rows.len());
            for (fd, resting) in self.kept.tables.of(of.host).beds() {
                let row = rows.next_if(|row| row.fd == fd);
                if let Some(resting) = resting {
                    table.push(resting.descriptor(fd));
                } else if let Some(row) = row {
                    let (file, close_on_exec) = (self.seen[row.file].id, row.header.close_on_exec);
                    table.push(Descriptor { fd, file, close_on_exec });
                }
            }
            tables.push(table);
        }
        Captured { files, tables, memfds: self.memfds }
    }

    /// Sockets that were as they were rest from now on, if nobody else has a descriptor of them.
    fn let_rest(&mut self, sockets: &mut SocketCapture) {
        if self.calm.is_empty() {
            return;
        }
        let mut inodes: HashMap<u64, usize> = HashMap::with_capacity(self.rows.rows.len());
        for row in &self.rows.rows {
            *inodes.entry(row.header.inode).or_default() += 1;
        }
        for &(index, owner) in &self.calm {
            let &[row] = self.seen[index].members.as_slice() else { continue };
            let row = &self.rows.rows[row];
            let (header, state) = (row.header, self.rows.mark(row));
            if inodes.get(&header.inode) != Some(&1) {
                continue;
            }
            let host = self.processes[row.process].host;
            let Some((slot, sleepers)) = self.kept.tables.slot_and_sleepers(host, row.fd) else {
                continue;
            };
            let laid = slot.lay(header.inode, host, sleepers, |identity, file| {
                let rest = sockets.rest(header.inode)?;
                Some(Resting { identity, state: state.into(), header, file, owner, rest })
            });
            if laid {
                self.objects[index] = None;
            }
        }
    }
}

impl DescriptorCapture {
    fn fresh_id(&mut self, taken: &std::collections::HashSet<FileId>) -> FileId {
        loop {
            let id = FileId(self.next_id);
            self.next_id = self.next_id.wrapping_add(1);
            if !taken.contains(&id) && !self.tables.sleepers.has_name(id) {
                return id;
            }
        }
    }
}

impl Session<'_> {
    /// The name of `file`, which was found in a socket's queue; it is captured as well if no
    /// process has it open.
    fn name(&mut self, file: OwnedFd) -> ObjectResult<FileId> {
        let own = super::own_pid();
        let number = file.as_raw_fd();
        let text = std::fs::read(format!("/proc/self/fdinfo/{number}"))
            .map_err(hotspare_kernel::KernelError::io("read fdinfo"))?;
        let (header, at) = fdinfo::parse(&text)?;
        let detail = text[at..].to_vec();
        if let Some(bed) = self.kept.tables.sleepers.find(header.inode)
            && descriptor::compare_files((bed.host, bed.fd), (own, number))?.is_eq()
        {
            return Ok(bed.file);
        }
        let key = table::key(&header, &detail);
        if self.index.is_none() {
            let mut index: HashMap<table::Key, Vec<usize>> = HashMap::new();
            for each in 0..self.seen.len() {
                let key = table::key(&self.seen[each].header, self.detail(each));
                index.entry(key).or_default().push(each);
            }
            self.index = Some(index);
        }
        let same_key = self.index.as_ref().and_then(|index| index.get(&key)).cloned();
        for candidate in same_key.unwrap_or_default() {
            if descriptor::compare_files(self.place(candidate), (own, number))?.is_eq() {
                return Ok(self.seen[candidate].id);
            }
        }
        let numbers = super::restore::own_descriptors()?;
        let subject = Subject {
            numbers: numbers.as_fd(),
            fd: number,
            header: &header,
            detail: &detail,
            duplicate: &|| {
                let copy = file.try_clone();
                Ok(copy.map_err(hotspare_kernel::KernelError::io("duplicate descriptor"))?)
            },
        };
        let known = classify(&subject, None)?;
        let taken = self.seen.iter().map(|seen| seen.id).collect();
        let id = self.kept.fresh_id(&taken);
        if let Some(index) = &mut self.index {
            index.entry(key).or_default().push(self.seen.len());
        }
        let found = Some((file, detail));
        self.seen.push(Seen { id, header, members: Vec::new(), found, known });
        Ok(id)
    }
}

/// The guest as sockets see it.
struct View<'a> {
    processes: &'a [GuestProcess<'a>],
}

impl GuestView for View<'_> {
    fn guest_pid(&self, host: i32) -> GuestPid {
        let host = HostPid(host);
        let known = self.processes.iter().find(|process| process.host == host);
        known.map_or_else(|| guest_number(host).unwrap_or_default(), |process| process.pid)
    }

    fn root(&self) -> PathBuf {
        let host = self.processes.first().map_or(HostPid(1), |process| process.host);
        PathBuf::from(format!("/proc/{host}/root"))
    }

    fn working_directories(&self) -> Vec<HostPath> {
        let directories = self.processes.iter().filter_map(|process| {
            let link = std::fs::read_link(format!("/proc/{}/cwd", process.host)).ok()?;
            Some(HostPath(link.to_str()?.to_owned()))
        });
        directories.collect()
    }
}

/// The number in the innermost pid namespace of process, thread or group `host`.
fn guest_number(host: HostPid) -> ObjectResult<GuestPid> {
    let what = || format!("the receiver {host} of a file's signals");
    let status = std::fs::read_to_string(format!("/proc/{host}/status"));
    let status = status.map_err(|_| ObjectError::refused(what(), "it has ended"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let inner = numbers.and_then(|numbers| numbers.split_whitespace().next_back()?.parse().ok());
    inner.map(GuestPid).ok_or_else(|| ObjectError::refused(what(), "it is not in the guest"))
}
