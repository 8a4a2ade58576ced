//! The memory of one address space: what is mapped, what was written, what is gone.
//!
//! # How a page reaches the ghost exactly as it was
//!
//! Every mapping is registered with a write-tracking userfaultfd. A scan of the page tables tells
//! what is not *armed*: nearly nothing. A second look at that tells which pages exist and which of
//! them were written since the last scan, and arms the written ones again, in one step for each
//! page. What is found written goes into the *backlog* and is copied from there. A page that is
//! written after its scan is found by the next one, so copying may go on while the guest runs; what
//! is copied from a stopped guest is final.
//!
//! A mapping that is not registered is *fresh*: made since the last scan, even if one of the same
//! shape stood there before. Everything in it counts as written, whatever marks of an earlier
//! registration its page table still has. Pages that were there at the last scan and are not any
//! more were discarded.
//!
//! Mappings are registered while the guest stands still and at no other time. A running guest may
//! have put a larger mapping in the place of the one that we have read of: registering that part
//! makes two of it, and mremap(2) over both fails (EFAULT).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::SharedBytes;
use hotspare_image::memory::{GuestRange, MmId, PAGE_BYTES, PageOwner};
use hotspare_kernel::memory::ProcMem;
use hotspare_kernel::pagemap::{self, Pagemap, Query, Region, Scanned, category};
use hotspare_kernel::proc_maps::{self, MapLine, Maps};
use hotspare_kernel::userfaultfd::WriteTracker;
use hotspare_kernel::{HostPid, KernelError};

use super::anonymous::{Anonymous, Changes};
use super::ranges::{Ranges, merge_sorted};
use super::rest::Rest;
use crate::objects::error::{ObjectError, ObjectResult};
use crate::pages::{Content, PageRun};

/// What we know of one address space.
#[derive(Debug)]
pub struct Space {
    /// Its name in checkpoints.
    pub id: MmId,
    pid: HostPid,
    tracker: WriteTracker,
    pagemap: Pagemap,
    memory: ProcMem,
    /// Our stub, which is not the guest's.
    stub: (u64, u64),
    /// The mappings of the last scan.
    pub(crate) lines: Vec<MapLine>,
    /// How often they have changed.
    pub(crate) lines_read: u64,
    pub(crate) maps: Arc<Mutex<Maps>>,
    /// The mark of the mappings at this stop, if it is known and still true.
    pub(crate) mappings_now: Option<u64>,
    /// The mark that they had when `lines` were read at a stop, and when that was.
    lines_of: Option<(u64, Instant)>,
    /// Pages with content in private mappings of files.
    in_files: Ranges,
    anonymous: Anonymous,
    backlog: Ranges,
    discards: Vec<GuestRange>,
    pub(crate) fresh: Vec<GuestRange>,
    /// Shared memory written through this space, as mapped ranges.
    pub(crate) shared_written: Vec<GuestRange>,
    pub(crate) reset: bool,
    stopped: bool,
    /// Pages with content in mappings that the last scan, of the running guest, left untracked.
    pub(crate) untracked_pages: u64,
    /// Where the last scan failed.
    suspects: Ranges,
    /// Mappings made with `MAP_DROPPABLE`, as of the last scan.
    pub(crate) droppable: Vec<(u64, u64)>,
}

/// Reading the mappings of a running guest takes several calls; one that was split or joined
/// between two of them appears twice.
fn make_disjoint(lines: &mut Vec<MapLine>) {
    let mut end = 0;
    for line in lines.iter_mut() {
        line.start = line.start.max(end);
        end = end.max(line.end);
    }
    lines.retain(|line| line.start < line.end);
}

/// Takes the stub out. Its last page may look like one with the guest's mapping behind it: for a
/// moment, while a thread asks what the memory of the process is like.
fn cut_off_stub((start, end): (u64, u64), lines: &mut Vec<MapLine>) {
    for line in lines.iter_mut().filter(|line| (start..end).contains(&line.start)) {
        line.start = line.end.min(end);
    }
    lines.retain(|line| line.start < line.end);
}

/// What a scan has found so far.
#[derive(Default)]
struct Found {
    regions: Vec<Region>,
    in_files: Ranges,
    written: Ranges,
    anonymous: Changes,
}

/// Neighbours that one call can scan.
fn alike(one: &MapLine, other: &MapLine) -> bool {
    let kind = tracked(one);
    matches!(kind, Tracked::Private { .. }) && kind == tracked(other)
}

/// What a mapping is to the scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracked {
    /// Private: anonymous, or a file with written pages on top.
    Private {
        /// Pages of the file itself are not the guest's.
        file: bool,
    },
    /// Memory shared between processes, which has no file on a disk.
    Shared,
    /// Shared mapping of a file: the file's own road carries the bytes.
    File,
    /// The kernel's own pages: vvar, vdso, vsyscall.
    Kernel,
}

/// How a mapping is tracked.
pub fn tracked(line: &MapLine) -> Tracked {
    match line.name.as_str() {
        "[vvar]" | "[vvar_vclock]" | "[vdso]" | "[vsyscall]" => Tracked::Kernel,
        _ if line.shared && is_shared_memory(line) => Tracked::Shared,
        _ if line.shared => Tracked::File,
        _ => Tracked::Private { file: line.inode != 0 },
    }
}

/// Whether a mapping is of a memory object: memfd, shared anonymous memory, SysV segment.
pub fn is_shared_memory(line: &MapLine) -> bool {
    line.name.starts_with("/memfd:")
        || line.name.starts_with("/dev/zero (deleted)")
        || line.name.starts_with("/SYSV")
}

/// How long a mapped file may go by its old name.
const LINES_LAST: Duration = Duration::from_secs(1);

const POPULATED: u64 = category::PRESENT | category::SWAPPED;
const ANONYMOUS: Tracked = Tracked::Private { file: false };

/// All pages of anonymous memory.
const ALL_QUERY: Query = Query {
    any_of: POPULATED,
    all_of: 0,
    inverted: 0,
    report: POPULATED | category::WRITTEN | category::ZERO,
    rearm: true,
    tracked: true,
};

/// Pages of anonymous memory that were written.
const WRITTEN_QUERY: Query = Query { all_of: category::WRITTEN, ..ALL_QUERY };

/// All pages in mappings of files that are not the file's own.
const FILE_QUERY: Query =
    Query { all_of: category::FILE, inverted: category::FILE, rearm: false, ..ALL_QUERY };

/// Whatever is not armed. (Empty entries could be armed in anonymous memory, too, but the kernel
/// would make page tables for all of a sparse mapping then.)
const QUICK_QUERY: Query = pagemap::NOT_ARMED;

/// The same, and arms it.
const ARM_QUERY: Query = Query { rearm: true, ..QUICK_QUERY };

/// Changes this close together are looked at in one go, bytes.
const CLUSTER_GAP: u64 = 128 * PAGE_BYTES;
/// Memory that can be gone over in the time of a second look.
const LOOK_BYTES: u64 = 1 << 20;
/// Looks at pages of files this close together are one look, bytes: a call takes as long as going
/// over this much.
const LOOK_GAP: u64 = 32 * PAGE_BYTES;
/// From this size on empty entries in mappings of files stay as they are, bytes: nobody makes page
/// tables for a sparse mapping.
const HOLE_BYTES: u64 = 2 << 20;

impl Space {
    /// Begins to track the memory of process `pid` with a userfaultfd made inside it.
    pub fn new(
        id: MmId,
        pid: HostPid,
        tracker: WriteTracker,
        stub: (u64, u64),
    ) -> ObjectResult<Self> {
        Ok(Self {
            id,
            pid,
            tracker,
            pagemap: Pagemap::open(pid)?,
            memory: ProcMem::open(pid)?,
            stub,
            lines: Vec::new(),
            lines_read: 0,
            maps: Arc::new(Mutex::new(Maps::open(pid)?)),
            mappings_now: None,
            lines_of: None,
            in_files: Ranges::default(),
            anonymous: Anonymous::default(),
            backlog: Ranges::default(),
            discards: Vec::new(),
            fresh: Vec::new(),
            shared_written: Vec::new(),
            reset: true,
            stopped: false,
            untracked_pages: 0,
            suspects: Ranges::default(),
            droppable: Vec::new(),
        })
    }

    /// Lets all pages wait to be copied.
    pub(crate) fn copy_again(&mut self) {
        self.backlog = self.backlog.with(&self.in_files).with(&self.anonymous.populated);
    }

    /// Pages found written and not copied yet.
    pub fn backlog_pages(&self) -> u64 {
        self.backlog.bytes() / PAGE_BYTES
    }

    /// Which pages have content of their own.
    pub(crate) fn populated(&self) -> Ranges {
        self.in_files.with(&self.anonymous.populated)
    }

    pub(crate) fn pid(&self) -> HostPid {
        self.pid
    }

    /// Pages with content of their own.
    pub fn populated_pages(&self) -> u64 {
        (self.in_files.bytes() + self.anonymous.populated.bytes()) / PAGE_BYTES
    }

    /// Reads the mappings and finds what was written or discarded since the last scan. Of a
    /// running guest (`stopped` false), mappings may change under it: what is not tracked yet is
    /// left to the next stop.
    pub fn scan(&mut self, stopped: bool) -> ObjectResult<()> {
        self.stopped = stopped;
        self.untracked_pages = 0;
        self.read_lines()?;
        let lines = std::mem::take(&mut self.lines);
        let mut found = Found::default();
        let mut failed = Ok(());
        let fresh_before = self.fresh.len();
        let suspects = self.suspects.clone();
        if stopped {
            self.suspects = Ranges::default();
        }
        for group in lines.chunk_by(|one, other| one.end == other.start && alike(one, other)) {
            let (start, end) = (group[0].start, group[group.len() - 1].end);
            let suspect = !suspects.within(start, end).is_empty();
            if !suspect && group.len() > 1 {
                match self.scan_group(group, &mut found) {
                    Ok(false) => {}
                    Ok(true) => continue,
                    Err(error) => {
                        self.suspect(start, end, &mut found);
                        failed = Err(error);
                        continue;
                    }
                }
            }
            for line in group {
                let suspect = !suspects.within(line.start, line.end).is_empty();
                if let Err(error) = self.scan_line(line, suspect, &mut found) {
                    self.suspect(line.start, line.end, &mut found);
                    failed = Err(error);
                }
            }
        }
        let fresh = self.fresh[fresh_before..].iter().map(|range| (range.start.0, range.end.0));
        let fresh = merge_sorted(fresh.collect());
        let taken = self.take_found(&lines, found, &fresh);
        self.lines = lines;
        failed.and(taken)
    }

    /// Whether the mappings must be as they were when they were last read at a stop. Somebody may
    /// have renamed a mapped file, which only reading them tells, so that is done now and then.
    pub(crate) fn has_same_lines(&self) -> bool {
        let same = |(mark, read): (u64, Instant)| {
            self.mappings_now == Some(mark) && read.elapsed() < LINES_LAST
        };
        self.lines_of.is_some_and(same)
    }

    fn read_lines(&mut self) -> ObjectResult<()> {
        if self.stopped && self.has_same_lines() {
            return Ok(());
        }
        // If it fails, nothing is known of them.
        let before = self.lines_of.take();
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if maps.read(&mut self.lines)? {
            self.lines_read += 1;
            cut_off_stub(self.stub, &mut self.lines);
            make_disjoint(&mut self.lines);
        }
        self.lines_of = match self.stopped {
            true => self.mappings_now.map(|mark| (mark, Instant::now())),
            false => before,
        };
        Ok(())
    }

    /// What the kernel armed again before a scan failed is not known: all of the range counts as
    /// written at the next stop.
    fn suspect(&mut self, start: u64, end: u64, found: &mut Found) {
        self.suspects = self.suspects.with(&merge_sorted(vec![(start, end)]));
        for (at, bytes) in self.in_files.within(start, end) {
            found.in_files.push(at, at + bytes as u64);
        }
    }

    fn take_found(&mut self, lines: &[MapLine], found: Found, fresh: &Ranges) -> ObjectResult<()> {
        let Found { in_files, written, anonymous, .. } = found;
        self.anonymous.take(&anonymous, fresh);
        self.backlog = self.backlog.with(&written);
        if !self.stopped {
            // The list of mappings of a running guest may miss one that moves meanwhile, so what
            // is not seen is not taken as gone.
            self.in_files = self.in_files.with(&in_files);
            return Ok(());
        }
        // What stood where memory is droppable now is gone as well.
        let mapped = lines.iter().filter(|line| tracked(line) == ANONYMOUS);
        let mapped = mapped.map(|line| (line.start, line.end));
        let mapped = mapped.filter(|range| !self.droppable.contains(range)).collect();
        self.anonymous.unmapped(mapped);
        // What stood where a mapping was just found to be new is discarded as a whole already.
        let gone = self.in_files.without(&in_files).without(fresh);
        let gone = gone.with(&std::mem::take(&mut self.anonymous.gone));
        if !gone.is_empty() {
            // Where memory of the other kind has come, a mapping having grown over the place of an
            // earlier one: what was copied of it may stand before the discard.
            let come = self.anonymous.populated.with(&in_files);
            self.backlog = self.backlog.with(&gone.common(&come));
        }
        self.discards.extend(gone.iter().map(|(start, end)| GuestRange::new(start, end)));
        self.in_files = in_files;
        Ok(())
    }

    fn scan_line(&mut self, line: &MapLine, suspect: bool, found: &mut Found) -> ObjectResult<()> {
        match tracked(line) {
            Tracked::Kernel | Tracked::File => Ok(()),
            // A stale line might make us arm private memory without copying it.
            Tracked::Shared if !self.stopped => Ok(()),
            Tracked::Shared => self.scan_shared(line, &mut found.regions),
            Tracked::Private { file } => {
                let range = (line.start, line.end);
                if !suspect && self.scan_private(range, file, found)? {
                    return Ok(());
                }
                if self.stopped {
                    return self.scan_fresh(line, file, found);
                }
                self.count_untracked(range, file, &mut found.regions)
            }
        }
    }

    /// Scans neighbours in one go; false if one of them is fresh.
    fn scan_group(&mut self, group: &[MapLine], found: &mut Found) -> ObjectResult<bool> {
        let Tracked::Private { file } = tracked(&group[0]) else { return Ok(false) };
        self.scan_private((group[0].start, group[group.len() - 1].end), file, found)
    }

    /// Scans private memory of one kind; false if a mapping in it is fresh.
    fn scan_private(
        &mut self,
        range: (u64, u64),
        file: bool,
        found: &mut Found,
    ) -> ObjectResult<bool> {
        let scanned = match file {
            true => self.scan_file(range, found)?,
            false => self.scan_changes(range, found)?,
        };
        if let Scanned::NotTracked(_) = scanned {
            return Ok(false);
        }
        self.droppable.retain(|known| known.1 <= range.0 || known.0 >= range.1);
        Ok(true)
    }

    /// Finds changes in a private mapping of a file. Its own pages and its empty entries are armed,
    /// too: so nearly all of it is, which the kernel tells in an eighth of the time that looking at
    /// each page takes. A second look takes what was not armed, and what had content before: that
    /// may have been given back to the file.
    fn scan_file(&mut self, (start, end): (u64, u64), found: &mut Found) -> ObjectResult<Scanned> {
        let mut changed = Vec::new();
        let quick = self.pagemap.scan(start, end, QUICK_QUERY, &mut changed)?;
        if let Scanned::NotTracked(_) = quick {
            return Ok(quick);
        }
        let written = self.arm(&changed)?;
        let known = self.in_files.within(start, end).into_iter();
        let known = known.map(|(at, bytes)| (at, at + bytes as u64));
        let mut looks = Ranges::default();
        for (from, to) in merge_sorted(known.chain(written.iter()).collect()).iter() {
            looks.push_near(from, to, LOOK_GAP);
        }
        let mut regions = Vec::new();
        for range in looks.iter() {
            self.scan_tracked(range, FILE_QUERY, &mut regions)?;
        }
        self.pagemap.without_markers(&mut regions)?;
        found.take_file(&regions, &written);
        Ok(Scanned::Complete)
    }

    /// Arms what a scan has found unarmed in mappings of files; returns what was, by then.
    fn arm(&mut self, changed: &[Region]) -> ObjectResult<Ranges> {
        let mut pieces: Vec<(bool, (u64, u64))> = Vec::new();
        for region in changed {
            let range = (region.start, region.end);
            let small = range.1 - range.0 < HOLE_BYTES;
            match pieces.last_mut() {
                Some((true, last)) if small && range.0 <= last.1 + CLUSTER_GAP => last.1 = range.1,
                _ => pieces.push((small, range)),
            }
        }
        let mut regions = Vec::new();
        for (small, range) in pieces {
            let query = if small { ARM_QUERY } else { ALL_QUERY };
            self.scan_tracked(range, query, &mut regions)?;
        }
        let written = regions.iter().filter(|region| region.categories & category::WRITTEN != 0);
        Ok(merge_sorted(written.map(|region| (region.start, region.end)).collect()))
    }

    /// Scans what was tracked a moment ago.
    fn scan_tracked(
        &mut self,
        (start, end): (u64, u64),
        query: Query,
        regions: &mut Vec<Region>,
    ) -> ObjectResult<()> {
        whole(self.pagemap.scan(start, end, query, regions)?)
    }

    /// Finds changes in anonymous memory. Nearly all of it has not changed, which the kernel tells
    /// fastest when it is asked for nothing else; a second look takes what has.
    fn scan_changes(
        &mut self,
        (start, end): (u64, u64),
        found: &mut Found,
    ) -> ObjectResult<Scanned> {
        let mut changed = Vec::new();
        let quick = self.pagemap.scan(start, end, QUICK_QUERY, &mut changed)?;
        if let Scanned::NotTracked(_) = quick {
            return Ok(quick);
        }
        let (mut told, mut clusters) = (Ranges::default(), Ranges::default());
        for region in &changed {
            told.push(region.start, region.end);
            clusters.push_near(region.start, region.end, CLUSTER_GAP);
        }
        if !pagemap::tells_missing_tables() {
            // Discarding a large range may free its page tables (`CONFIG_PT_RECLAIM`), and
            // mremap(2) may take them away (`MREMAP_DONTUNMAP`).
            let mut all = Vec::new();
            self.pagemap.scan(start, end, Query { rearm: false, ..ALL_QUERY }, &mut all)?;
            let all = merge_sorted(all.iter().map(|region| (region.start, region.end)).collect());
            told = told.with(&merge_sorted(vec![(start, end)]).without(&all));
        }
        // A look at one costs as much as going over this much memory.
        if clusters.count() as u64 > (end - start) / LOOK_BYTES {
            clusters = merge_sorted(vec![(start, end)]);
        }
        found.regions.clear();
        for range in clusters.iter() {
            self.scan_tracked(range, WRITTEN_QUERY, &mut found.regions)?;
        }
        // Nothing is taken before all has been looked at.
        told.iter().for_each(|(from, to)| found.anonymous.changed.push(from, to));
        found.take_regions(false);
        Ok(Scanned::Complete)
    }

    /// Counts what a private mapping holds that only a stop can begin to track.
    fn count_untracked(
        &mut self,
        (start, end): (u64, u64),
        file: bool,
        regions: &mut Vec<Region>,
    ) -> ObjectResult<()> {
        if self.droppable.contains(&(start, end)) {
            return Ok(());
        }
        let of_it = if file { FILE_QUERY } else { ALL_QUERY };
        regions.clear();
        let query = Query { rearm: false, tracked: false, ..of_it };
        self.pagemap.scan(start, end, query, regions)?;
        let held = regions.iter().filter(|region| region.categories & category::ZERO == 0);
        self.untracked_pages +=
            held.map(|region| (region.end - region.start) / PAGE_BYTES).sum::<u64>();
        Ok(())
    }

    /// Scans a private mapping that is not tracked yet, or not known to be.
    fn scan_fresh(&mut self, line: &MapLine, file: bool, found: &mut Found) -> ObjectResult<()> {
        let registered = self.register(line);
        if !file && self.is_droppable(line, &registered)? {
            return Ok(());
        }
        self.registered(line, registered)?;
        self.discards.push(GuestRange::new(line.start, line.end));
        let range = (line.start, line.end);
        if file {
            // Nothing in it is armed, so all that it has counts as written.
            return whole(self.scan_file(range, found)?);
        }
        found.regions.clear();
        self.scan_tracked(range, ALL_QUERY, &mut found.regions)?;
        found.take_regions(true);
        Ok(())
    }

    /// Whether a mapping was refused because it is droppable memory (mmap(2), `MAP_DROPPABLE`), as
    /// the C library and the Go runtime have for random numbers (vgetrandom). Its content may
    /// vanish at any time, so it does not travel: the ghost's is always empty.
    fn is_droppable(
        &mut self,
        line: &MapLine,
        registered: &hotspare_kernel::Result<()>,
    ) -> ObjectResult<bool> {
        let range = (line.start, line.end);
        let refused = registered.as_ref().err().and_then(KernelError::errno);
        if refused != Some(libc::EINVAL) {
            self.droppable.retain(|known| *known != range);
            return Ok(false);
        }
        if !self.droppable.contains(&range) {
            let flags = proc_maps::flags(self.pid)?;
            if !flags.iter().any(|flags| flags.start == line.start && flags.has(b"dp")) {
                return Ok(false);
            }
            self.droppable.push(range);
        }
        Ok(true)
    }

    /// The flags of a droppable mapping, which stay what mmap(2) made them; 0 of any other.
    pub(crate) fn droppable_flags(&self, line: &MapLine) -> u32 {
        use hotspare_image::memory::mapping_flags as flag;
        let droppable = self.droppable.contains(&(line.start, line.end));
        let all = flag::DROPPABLE | flag::NO_RESERVE | flag::WIPE_ON_FORK | flag::DONT_DUMP;
        if droppable { all } else { 0 }
    }

    /// Scans a shared mapping. Pages of shared memory leave the page table when memory is short,
    /// so what is asked for is "not known to be unwritten".
    fn scan_shared(&mut self, line: &MapLine, regions: &mut Vec<Region>) -> ObjectResult<()> {
        let query = ARM_QUERY;
        regions.clear();
        if let Scanned::NotTracked(_) = self.pagemap.scan(line.start, line.end, query, regions)? {
            match self.register(line) {
                // Opened or sealed so that nobody can write through this mapping.
                Err(error) if error.errno() == Some(libc::EPERM) => return Ok(()),
                registered => self.registered(line, registered)?,
            }
            regions.clear();
            self.pagemap.scan(line.start, line.end, query, regions)?;
        }
        let found = regions.iter().map(|region| GuestRange::new(region.start, region.end));
        self.shared_written.extend(found);
        Ok(())
    }

    /// Begins to track a mapping, in which every page counts as written then.
    fn register(&self, line: &MapLine) -> hotspare_kernel::Result<()> {
        self.tracker.register(line.start, line.end)?;
        self.tracker.unprotect(line.start, line.end)
    }

    fn registered(
        &mut self,
        line: &MapLine,
        registered: hotspare_kernel::Result<()>,
    ) -> ObjectResult<()> {
        self.fresh.push(GuestRange::new(line.start, line.end));
        registered.map_err(|error| match error.errno() {
            Some(libc::EBUSY) => ObjectError::refused(
                format!("the mapping at {:#x}", line.start),
                "the program uses userfaultfd itself, and a mapping can have only one",
            ),
            _ => ObjectError::refused(
                format!("the mapping at {:#x} ({})", line.start, line.name),
                format!("writes to it cannot be tracked: {error}"),
            ),
        })
    }

    /// Copies up to `bytes_max` of the backlog, and all discards.
    ///
    /// Of a running guest, pages that went away meanwhile are left out; the next scan sees them
    /// gone.
    pub(crate) fn copy(&mut self, bytes_max: u64, rest: &mut Rest) -> ObjectResult<()> {
        let owner = PageOwner::Mm(self.id);
        rest.discards.extend(self.discards.drain(..).map(|range| PageRun {
            owner,
            start: range.start.0,
            content: Content::Discard(range.bytes() / PAGE_BYTES),
        }));
        let spans = self.backlog.take(bytes_max);
        rest.read(owner, self.pid, &self.memory, spans)
    }
}

/// What was tracked a moment ago has to be.
fn whole(scanned: Scanned) -> ObjectResult<()> {
    match scanned {
        Scanned::Complete => Ok(()),
        Scanned::NotTracked(at) => Err(ObjectError::transient(
            format!("mapping at {at:#x}"),
            "changed while it was scanned",
        )),
    }
}

/// Whether there is content, other than that of the zero page.
fn exists(region: &Region) -> bool {
    region.categories & POPULATED != 0 && region.categories & category::ZERO == 0
}

impl Found {
    /// Sorts scanned regions of anonymous memory into what exists and what was written.
    fn take_regions(&mut self, fresh: bool) {
        for region in self.regions.iter().filter(|region| exists(region)) {
            let (start, end) = (region.start, region.end);
            if fresh || region.categories & category::WRITTEN != 0 {
                self.written.push(start, end);
            }
            self.anonymous.written.push(start, end);
        }
    }

    /// The same for a mapping of a file, of which `written` was not armed before the look.
    fn take_file(&mut self, regions: &[Region], written: &Ranges) {
        for region in regions.iter().filter(|region| exists(region)) {
            let (start, end) = (region.start, region.end);
            self.in_files.push(start, end);
            if region.categories & category::WRITTEN != 0 {
                self.written.push(start, end);
                continue;
            }
            for (at, bytes) in written.within(start, end) {
                self.written.push(at, at + bytes as u64);
            }
        }
    }
}

/// Fewer zero pages than this travel among the others, where they cost next to nothing.
const ZEROES_APART: usize = 16;

/// Appends `bytes` as runs, long stretches of zero pages apart.
pub(crate) fn split_zeroes(
    owner: PageOwner,
    start: u64,
    bytes: &SharedBytes,
    runs: &mut Vec<PageRun>,
) {
    let page = PAGE_BYTES as usize;
    let mut push = |from: usize, to: usize, zero: bool| {
        let content = if zero {
            Content::Zero(((to - from) / page) as u64)
        } else {
            Content::Bytes(bytes.part(from..to))
        };
        if from < to {
            runs.push(PageRun { owner, start: start + from as u64, content });
        }
    };
    let (mut from, mut zeroes) = (0, 0);
    for at in (0..bytes.len()).step_by(page) {
        if is_zero(&bytes[at..at + page]) {
            zeroes += 1;
            continue;
        }
        if zeroes >= ZEROES_APART {
            push(from, at - zeroes * page, false);
            push(at - zeroes * page, at, true);
            from = at;
        }
        zeroes = 0;
    }
    let apart = if zeroes >= ZEROES_APART { zeroes * page } else { 0 };
    push(from, bytes.len() - apart, false);
    push(bytes.len() - apart, bytes.len(), true);
}

fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(64).all(|line| {
        line.chunks_exact(8)
            .fold(0u64, |all, word| all | u64::from_ne_bytes(word.try_into().expect("eight bytes")))
            == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_one_with_the_stub_is_kept() {
        let line = |start, end| MapLine { start, end, ..MapLine::default() };
        let mut lines = vec![line(0x1000, 0x5000), line(0x5000, 0x8000), line(0x8000, 0xc000)];
        cut_off_stub((0x5000, 0x9000), &mut lines);
        assert_eq!(lines, [line(0x1000, 0x5000), line(0x9000, 0xc000)]);
        let mut lines = vec![line(0x1000, 0x5000), line(0x5000, 0x9000), line(0x9000, 0xc000)];
        cut_off_stub((0x5000, 0x9000), &mut lines);
        assert_eq!(lines, [line(0x1000, 0x5000), line(0x9000, 0xc000)]);
    }
}
