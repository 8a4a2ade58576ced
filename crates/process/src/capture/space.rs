//! The memory of one address space: what is mapped, what was written, what is gone.
//!
//! # How a page reaches the ghost exactly as it was
//!
//! Every mapping is registered with a write-tracking userfaultfd. One scan of the page tables
//! tells which pages exist, which of them were written since the last scan, and protects the
//! written ones again, in one step for each page. What is found written goes into the *backlog*
//! and is copied from there. A page that is written after its scan is found by the next one, so
//! copying may go on while the guest runs; what is copied from a stopped guest is final.
//!
//! A mapping that is not registered is *fresh*: made since the last scan, even if one of the same
//! shape stood there before. Everything in it counts as written, whatever marks of an earlier
//! registration its page table still has. Pages that were there at the last scan and are not any
//! more were discarded.

use hotspare_image::memory::{GuestRange, MmId, PAGE_BYTES, PageOwner};
use hotspare_kernel::memory::{self, ProcMem, Span};
use hotspare_kernel::pagemap::{Pagemap, Query, Region, Scanned, category};
use hotspare_kernel::proc_maps::{self, MapLine};
use hotspare_kernel::userfaultfd::WriteTracker;
use hotspare_kernel::{HostPid, KernelError};

use super::ranges::{Ranges, merge_sorted};
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
    text: Vec<u8>,
    populated: Ranges,
    backlog: Ranges,
    discards: Vec<GuestRange>,
    pub(crate) fresh: Vec<GuestRange>,
    /// Shared memory written through this space, as mapped ranges.
    pub(crate) shared_written: Vec<GuestRange>,
    pub(crate) reset: bool,
    stopped: bool,
    /// Where the last scan failed.
    suspects: Ranges,
    /// Mappings made with `MAP_DROPPABLE`, as of the last scan.
    droppable: Vec<(u64, u64)>,
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

/// What a scan has found so far.
#[derive(Default)]
struct Found {
    regions: Vec<Region>,
    populated: Ranges,
    written: Ranges,
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

const POPULATED: u64 = category::PRESENT | category::SWAPPED;

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
            text: Vec::new(),
            populated: Ranges::default(),
            backlog: Ranges::default(),
            discards: Vec::new(),
            fresh: Vec::new(),
            shared_written: Vec::new(),
            reset: true,
            stopped: false,
            suspects: Ranges::default(),
            droppable: Vec::new(),
        })
    }

    /// Makes the next checkpoint describe the whole space as new: all pages wait to be copied.
    pub fn rewind(&mut self) {
        self.reset = true;
        self.discards.clear();
        self.copy_again();
    }

    /// Lets all pages wait to be copied.
    pub(crate) fn copy_again(&mut self) {
        self.backlog = self.backlog.with(&self.populated);
    }

    /// Pages found written and not copied yet.
    pub fn backlog_pages(&self) -> u64 {
        self.backlog.bytes() / PAGE_BYTES
    }

    /// Pages with content of their own.
    pub fn populated_pages(&self) -> u64 {
        self.populated.bytes() / PAGE_BYTES
    }

    /// Reads the mappings and finds what was written or discarded since the last scan. Of a
    /// running guest (`stopped` false), mappings may change under it: what cannot be tracked then
    /// is left to the next scan.
    pub fn scan(&mut self, stopped: bool) -> ObjectResult<()> {
        self.stopped = stopped;
        let mut lines = std::mem::take(&mut self.lines);
        proc_maps::read(self.pid, &mut self.text, &mut lines)?;
        lines.retain(|line| line.start < self.stub.0 || line.start >= self.stub.1);
        make_disjoint(&mut lines);
        let mut found = Found::default();
        let mut failed = Ok(());
        let fresh_before = self.fresh.len();
        let suspects = self.suspects.clone();
        if stopped {
            self.suspects = Ranges::default();
        }
        for line in &lines {
            let suspect = !suspects.within(line.start, line.end).is_empty();
            if let Err(error) = self.scan_line(line, suspect, &mut found) {
                // What the kernel armed again before it failed is not known: all of the line
                // counts as written at the next scan.
                let whole = merge_sorted(vec![(line.start, line.end)]);
                self.suspects = self.suspects.with(&whole);
                let kept = self.populated.within(line.start, line.end).into_iter();
                kept.for_each(|(at, bytes)| found.populated.push(at, at + bytes as u64));
                failed = Err(error);
            }
        }
        let Found { populated, written, .. } = found;
        self.lines = lines;
        if stopped {
            // What stood where a mapping was just found to be new is discarded as a whole already.
            let fresh = self.fresh[fresh_before..].iter().map(|range| (range.start.0, range.end.0));
            let gone = self.populated.without(&populated).without(&merge_sorted(fresh.collect()));
            self.discards.extend(gone.iter().map(|(start, end)| GuestRange::new(start, end)));
            self.populated = populated;
        } else {
            // The list of mappings of a running guest may miss one that moves meanwhile, so what
            // is not seen is not taken as gone.
            self.populated = self.populated.with(&populated);
        }
        self.backlog = self.backlog.with(&written);
        failed
    }

    fn scan_line(&mut self, line: &MapLine, suspect: bool, found: &mut Found) -> ObjectResult<()> {
        match tracked(line) {
            Tracked::Kernel | Tracked::File => Ok(()),
            // A stale line might make us arm private memory without copying it.
            Tracked::Shared if !self.stopped => Ok(()),
            Tracked::Shared => self.scan_shared(line, &mut found.regions),
            Tracked::Private { file } => {
                let fresh = self.scan_private(line, file, suspect, &mut found.regions)?;
                found.take_regions(fresh);
                Ok(())
            }
        }
    }

    /// Scans a private mapping into `regions`; true if it was fresh, as a suspect one always is.
    fn scan_private(
        &mut self,
        line: &MapLine,
        file: bool,
        suspect: bool,
        regions: &mut Vec<Region>,
    ) -> ObjectResult<bool> {
        let mut query = Query {
            any_of: POPULATED,
            report: POPULATED | category::WRITTEN | category::ZERO,
            rearm: true,
            ..Query::default()
        };
        if file {
            query.all_of = category::FILE;
            query.inverted = category::FILE;
        }
        regions.clear();
        let known = !suspect
            && self.pagemap.scan(line.start, line.end, query, regions)? == Scanned::Complete;
        if known {
            self.droppable.retain(|range| *range != (line.start, line.end));
            return Ok(false);
        }
        let registered = self.register(line);
        if !file && self.is_droppable(line, &registered)? {
            regions.clear();
            return Ok(false);
        }
        self.registered(line, registered)?;
        self.discards.push(GuestRange::new(line.start, line.end));
        regions.clear();
        match self.pagemap.scan(line.start, line.end, query, regions)? {
            Scanned::Complete => Ok(true),
            Scanned::NotTracked(at) => Err(ObjectError::transient(
                format!("mapping at {at:#x}"),
                "changed while it was scanned",
            )),
        }
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
        let query = Query {
            all_of: category::WRITTEN,
            report: category::WRITTEN,
            rearm: true,
            ..Query::default()
        };
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
        let stopped = self.stopped;
        registered.map_err(|error| match error.errno() {
            _ if !stopped => ObjectError::transient(
                format!("the mapping at {:#x}", line.start),
                "changed while it was scanned",
            ),
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

    /// Copies up to `bytes_max` of the backlog, and all discards, into `runs`.
    ///
    /// Of a running guest, pages that went away meanwhile are left out; the next scan sees them
    /// gone.
    pub fn copy(&mut self, bytes_max: u64, runs: &mut Vec<PageRun>) -> ObjectResult<()> {
        let owner = PageOwner::Mm(self.id);
        runs.extend(self.discards.drain(..).map(|range| PageRun {
            owner,
            start: range.start.0,
            content: Content::Discard(range.bytes() / PAGE_BYTES),
        }));
        let spans = self.backlog.take(bytes_max);
        for (start, bytes) in self.read_spans(&spans)? {
            split_zeroes(owner, start, &bytes, runs);
        }
        Ok(())
    }

    /// Reads whole spans; where a page refuses, the span is cut there and goes on behind it.
    fn read_spans(&self, spans: &[Span]) -> ObjectResult<Vec<(u64, Vec<u8>)>> {
        let total: usize = spans.iter().map(|span| span.1).sum();
        let mut bytes = vec![0u8; total];
        let got = memory::read(self.pid, spans, &mut bytes)?;
        let mut pieces = Vec::with_capacity(spans.len());
        let mut offset = 0;
        for &(start, length) in spans {
            let whole = got.saturating_sub(offset).min(length) & !(PAGE_BYTES as usize - 1);
            if whole > 0 {
                pieces.push((start, bytes[offset..offset + whole].to_vec()));
            }
            if whole < length {
                self.read_page_by_page(start + whole as u64, length - whole, &mut pieces)?;
            }
            offset += length;
        }
        Ok(pieces)
    }

    /// `/proc/PID/mem` also reads what the program itself may not (`PROT_NONE`).
    fn read_page_by_page(
        &self,
        start: u64,
        length: usize,
        pieces: &mut Vec<(u64, Vec<u8>)>,
    ) -> ObjectResult<()> {
        let mut page = vec![0u8; PAGE_BYTES as usize];
        for at in (start..start + length as u64).step_by(PAGE_BYTES as usize) {
            match self.memory.read_exact(at, &mut page) {
                Ok(()) => pieces.push((at, page.clone())),
                Err(error) if error.errno() == Some(libc::EIO) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Found {
    /// Sorts scanned regions into what exists and what was written.
    fn take_regions(&mut self, fresh: bool) {
        for region in &self.regions {
            if region.categories & category::ZERO != 0 {
                continue;
            }
            self.populated.push(region.start, region.end);
            if fresh || region.categories & category::WRITTEN != 0 {
                self.written.push(region.start, region.end);
            }
        }
    }
}

/// Appends `bytes` as runs, zero pages apart.
pub(crate) fn split_zeroes(owner: PageOwner, start: u64, bytes: &[u8], runs: &mut Vec<PageRun>) {
    let page = PAGE_BYTES as usize;
    let mut from = 0;
    while from < bytes.len() {
        let zero = is_zero(&bytes[from..from + page]);
        let mut to = from + page;
        while to < bytes.len() && is_zero(&bytes[to..to + page]) == zero {
            to += page;
        }
        let content = if zero {
            Content::Zero(((to - from) / page) as u64)
        } else {
            Content::Bytes(bytes[from..to].to_vec())
        };
        runs.push(PageRun { owner, start: start + from as u64, content });
        from = to;
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.chunks_exact(64).all(|line| {
        line.chunks_exact(8)
            .fold(0u64, |all, word| all | u64::from_ne_bytes(word.try_into().expect("eight bytes")))
            == 0
    })
}
