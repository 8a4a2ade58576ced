//! Memory that several processes share: memfds, shared anonymous mappings, SysV segments.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;

use hotspare_image::memory::{Backing, PAGE_BYTES, PageOwner, SharedId, SharedKind, SharedMemory};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::HostPid;
use hotspare_kernel::proc_maps::MapLine;
use hotspare_kernel::sparse::{next_data, read_up_to};

use super::ranges::{Ranges, merge_sorted};
use super::space::{Space, Tracked, split_zeroes, tracked};
use crate::objects::error::{ObjectError, ObjectResult};
use crate::pages::{Content, PageRun};

/// Marks the names of SysV segments, whose inode numbers are their own.
const SYSV: u64 = 1 << 63;

/// All shared memory objects of a guest.
#[derive(Debug, Default)]
pub struct SharedTable {
    objects: BTreeMap<SharedId, Object>,
}

#[derive(Debug)]
struct Object {
    id: SharedId,
    kind: SharedKind,
    file: File,
    /// Changes when the object is written by write(2), truncated or punched.
    stamp: (u64, i64, i64),
    data: Ranges,
    backlog: Ranges,
    reset: bool,
    used: bool,
}

impl SharedTable {
    /// Forgets which objects are in use; [`SharedTable::note`] says it again.
    pub fn begin_round(&mut self) {
        self.objects.values_mut().for_each(|object| object.used = false);
    }

    /// Drops objects that nothing used since [`SharedTable::begin_round`].
    pub fn end_round(&mut self) {
        self.objects.retain(|_, object| object.used);
    }

    /// Name of the memfd or shared anonymous memory with inode number `inode`.
    pub fn name_of(inode: u64) -> SharedId {
        SharedId(inode)
    }

    /// A System V segment, which may have no mapping at this instant. `used`: somebody attached
    /// or detached it since the last round, so that its content may have changed unseen.
    pub fn note_segment(
        &mut self,
        file: BorrowedFd<'_>,
        kind: SharedKind,
        used: bool,
    ) -> ObjectResult<()> {
        let own = File::from(file.try_clone_to_owned().map_err(io("keep shared memory"))?);
        let inode = own.metadata().map_err(io("look at shared memory"))?.ino();
        let id = SharedId(inode | SYSV);
        let made = Object::new(id, kind.clone(), own);
        let object = self.objects.entry(id).or_insert(made);
        (object.kind, object.used) = (kind, true);
        if used {
            object.stamp = (0, 0, 0);
        }
        Ok(())
    }

    /// Takes note of a memfd that descriptor `fd` of process `pid` leads to.
    pub fn note_descriptor(
        &mut self,
        pid: HostPid,
        fd: i32,
        id: SharedId,
        kind: SharedKind,
    ) -> ObjectResult<()> {
        match self.objects.get_mut(&id) {
            Some(object) => {
                object.used = true;
                // Seals may have come since.
                object.kind = kind;
                Ok(())
            }
            None => {
                let file = open(&format!("/proc/{pid}/fd/{fd}"))?;
                self.objects.insert(id, Object::new(id, kind, file));
                Ok(())
            }
        }
    }

    fn note_mapping(&mut self, pid: HostPid, line: &MapLine) -> ObjectResult<SharedId> {
        let sysv = line.name.starts_with("/SYSV");
        let id = SharedId(line.inode | if sysv { SYSV } else { 0 });
        match self.objects.get_mut(&id) {
            Some(object) => object.used = true,
            None => {
                let path = format!("/proc/{pid}/map_files/{:x}-{:x}", line.start, line.end);
                let file = open(&path)?;
                let mode = file.metadata().map_err(io("look at shared memory"))?.mode();
                let kind = kind_of(&line.name, line.inode, mode);
                self.objects.insert(id, Object::new(id, kind, file));
            }
        }
        Ok(id)
    }

    /// What stands behind a shared-memory mapping.
    pub fn backing(&mut self, pid: HostPid, line: &MapLine) -> ObjectResult<Backing> {
        let object = self.note_mapping(pid, line)?;
        Ok(Backing::SharedMemory {
            object,
            offset: line.offset,
            private: !line.shared,
            writable: true,
        })
    }

    /// Takes what `space` saw written through its shared mappings into the backlog.
    pub fn take_written(&mut self, pid: HostPid, space: &mut Space) -> ObjectResult<()> {
        let written = std::mem::take(&mut space.shared_written);
        for line in space.lines.iter().filter(|line| tracked(line) == Tracked::Shared) {
            let id = self.note_mapping(pid, line)?;
            let Some(object) = self.objects.get_mut(&id) else { continue };
            let inside =
                written.iter().filter(|range| range.start.0 < line.end && line.start < range.end.0);
            let offsets = inside.map(|range| {
                let base = line.offset.wrapping_sub(line.start);
                (range.start.0.wrapping_add(base), range.end.0.wrapping_add(base))
            });
            object.backlog = object.backlog.with(&merge_sorted(offsets.collect()));
        }
        Ok(())
    }

    /// Looks for changes that no mapping shows: write(2), ftruncate(2), fallocate(2). Appends
    /// discards to `runs`.
    pub fn scan(&mut self, runs: &mut Vec<PageRun>) -> ObjectResult<()> {
        for object in self.objects.values_mut() {
            let found = object.file.metadata().map_err(io("look at shared memory"))?;
            let stamp = (found.len(), found.ctime(), found.ctime_nsec());
            let changed = stamp != object.stamp;
            if !changed && object.backlog.bytes() == 0 {
                continue;
            }
            let data = data_ranges(&object.file, found.len())?;
            let owner = PageOwner::Shared(object.id);
            runs.extend(object.data.without(&data).iter().map(|(start, end)| PageRun {
                owner,
                start,
                content: Content::Discard((end - start) / PAGE_BYTES),
            }));
            if changed {
                object.backlog = data.clone();
                object.stamp = stamp;
            }
            object.data = data;
        }
        Ok(())
    }

    /// Pages to copy.
    pub fn backlog_pages(&self) -> u64 {
        self.objects.values().map(|object| object.backlog.bytes() / PAGE_BYTES).sum()
    }

    /// Copies up to `bytes_max` of each object's backlog into `runs`.
    pub fn copy(&mut self, bytes_max: u64, runs: &mut Vec<PageRun>) -> ObjectResult<()> {
        for object in self.objects.values_mut() {
            for (start, length) in object.backlog.take(bytes_max) {
                object.read(start, length, runs)?;
            }
        }
        Ok(())
    }

    /// Lets all pages wait to be copied.
    pub(crate) fn copy_again(&mut self) {
        for object in self.objects.values_mut() {
            object.backlog = object.backlog.with(&object.data);
        }
    }

    /// The objects as a checkpoint lists them.
    pub fn describe(&mut self) -> Vec<SharedMemory> {
        self.objects
            .values_mut()
            .map(|object| SharedMemory {
                id: object.id,
                kind: object.kind.clone(),
                bytes: object.stamp.0,
                reset: std::mem::take(&mut object.reset),
            })
            .collect()
    }
}

impl Object {
    fn new(id: SharedId, kind: SharedKind, file: File) -> Self {
        Self {
            id,
            kind,
            file,
            stamp: (0, 0, 0),
            data: Ranges::default(),
            backlog: Ranges::default(),
            reset: true,
            used: true,
        }
    }

    fn read(&self, start: u64, length: usize, runs: &mut Vec<PageRun>) -> ObjectResult<()> {
        let mut bytes = vec![0u8; length];
        read_up_to(&self.file, &mut bytes, start).map_err(io("read shared memory"))?;
        // The last page of an object whose size is odd is whole in memory, zero behind the end.
        split_zeroes(PageOwner::Shared(self.id), start, &bytes.into(), runs);
        Ok(())
    }
}

/// Opens shared memory through /proc; what may only be read is read.
fn open(path: &str) -> ObjectResult<File> {
    let both = File::options().read(true).write(true).open(path);
    both.or_else(|_| File::open(path)).map_err(|error| match error.kind() {
        // The guest runs, and has just unmapped or closed it.
        std::io::ErrorKind::NotFound => ObjectError::transient(path, "gone since it was listed"),
        _ => io("open shared memory")(error),
    })
}

fn kind_of(name: &str, inode: u64, mode: u32) -> SharedKind {
    let bare = name.strip_suffix(" (deleted)").unwrap_or(name);
    if let Some(memfd) = bare.strip_prefix("/memfd:") {
        return SharedKind::Memfd { name: memfd.to_owned(), seals: 0, mode: mode & 0o777 };
    }
    match bare.strip_prefix("/SYSV").and_then(|key| u32::from_str_radix(key, 16).ok()) {
        Some(key) => SharedKind::SysV {
            id: inode as i32,
            key: key as i32,
            mode: mode & 0o777,
            uid: 0,
            gid: 0,
            creator: GuestPid::default(),
        },
        None => SharedKind::Anonymous,
    }
}

/// Ranges of a memory object that hold pages, page aligned.
fn data_ranges(file: &File, bytes: u64) -> ObjectResult<Ranges> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < bytes {
        let found = next_data(file, at);
        let found = found.map_err(|errno| io("find shared memory")(errno.into()))?;
        let Some((start, end)) = found else { break };
        ranges.push((start & !(PAGE_BYTES - 1), end.div_ceil(PAGE_BYTES) * PAGE_BYTES));
        at = end;
    }
    Ok(merge_sorted(ranges))
}

fn io(what: &'static str) -> impl Fn(std::io::Error) -> ObjectError {
    move |source| hotspare_kernel::KernelError::Call { verb: what, source }.into()
}
