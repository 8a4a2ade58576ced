//! The touch set of a checkpoint: what the program reads or writes in a window after it.
//!
//! # Seeing reads without stopping anything
//!
//! The processor notes the first touch of a page in the page table. Those notes are cleared
//! shortly before the guest is stopped for the checkpoint, so that clearing is not part of the
//! pause; what processors remember of the page tables is flushed while the guest stands still.
//! From then on the notes grow by themselves, and are looked at now and then: a page that has one
//! for the first time belongs to that part of the window. What was touched between the clearing
//! and the stop counts as touched at once, which errs on the safe side.
//!
//! Where page tables cannot be read ([`PageTables::open`]) there is no touch set.

use std::time::{Duration, Instant};

use hotspare_image::memory::{MmId, PAGE_BYTES, PageOwner};
use hotspare_image::source::Span;
use hotspare_image::touch::{TouchGroup, TouchSet};
use hotspare_kernel::accessed::{self, PageTables, TableRoot};
use hotspare_kernel::remote::Call;
use hotspare_kernel::{HostPid, KernelError};

use super::ranges::Ranges;
use crate::guest::Guest;
use crate::lazy::Window;
use crate::objects::error::ObjectResult;

/// Pages that are unmapped at once to make the kernel flush everything: more than it flushes one
/// by one (`tlb_single_page_flush_ceiling`, 33).
const FLUSH_BYTES: u64 = 64 * PAGE_BYTES;

/// A tracking window that is open. It reads page tables and touches nothing, so it may live on
/// another thread than the guest's tracer.
#[derive(Debug)]
pub struct Touches {
    tables: PageTables,
    spaces: Vec<Tracked>,
    began: Instant,
    looks: u32,
    groups: Vec<TouchGroup>,
    /// Of the checkpoint: what may be touched at all.
    bytes: u64,
    touched: u64,
}

#[derive(Debug)]
struct Tracked {
    pid: HostPid,
    id: MmId,
    root: TableRoot,
    /// Pages of the checkpoint that have not been touched yet.
    left: Ranges,
}

impl Guest {
    /// To be called while the guest runs, shortly before the checkpoint whose touch set is wanted;
    /// [`Guest::begin_touches`] follows it.
    pub fn forget_touches(&mut self) -> ObjectResult<()> {
        for pid in self.processes() {
            match accessed::forget_touches(pid) {
                Err(error) if error.is_died() => {}
                done => done?,
            }
        }
        self.flushes = true;
        Ok(())
    }

    /// Opens the tracking window of the checkpoint that was just taken.
    ///
    /// Fails where page tables cannot be read.
    pub fn begin_touches(&mut self, mut tables: PageTables) -> ObjectResult<Touches> {
        let began = Instant::now();
        let mut spaces = Vec::new();
        let all = self.processes.values().filter_map(|process| process.space.as_ref());
        for space in all {
            let (pid, left) = (space.pid(), space.populated());
            match root_of(&mut tables, pid, &left) {
                Ok(Some(root)) => spaces.push(Tracked { pid, id: space.id, root, left }),
                Ok(None) => {}
                Err(error) if error.is_died() => {}
                Err(error) => return Err(error.into()),
            }
        }
        let bytes = spaces.iter().map(|space| space.left.bytes()).sum();
        let groups = Vec::new();
        Ok(Touches { tables, spaces, began, looks: 0, groups, bytes, touched: 0 })
    }

    /// In the stopped guest: processors forget what they know of its page tables.
    pub(super) fn flush_stopped(&mut self) -> ObjectResult<()> {
        if !std::mem::take(&mut self.flushes) {
            return Ok(());
        }
        for pid in self.processes().collect::<Vec<_>>() {
            // A filter may forbid the calls, and end the process for them. The scan flushes much.
            let Some(process) = self.processes.get(&pid) else { continue };
            let confined = process.cache.confined.is_none_or(|(_, seccomp, _)| seccomp != 0);
            if confined || process.stub.is_none() {
                continue;
            }
            let tid = self.visitable_thread(pid)?;
            let Some(stub) = self.processes.get(&pid).and_then(|process| process.stub.as_ref())
            else {
                continue;
            };
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
            let none = u64::MAX;
            let arguments = [0, FLUSH_BYTES, libc::PROT_READ as u64, flags as u64, none, 0];
            let mut map = [Call::new(libc::SYS_mmap, &arguments)];
            stub.run(tid, 0, &mut map)?;
            // A guest that is at its limit goes without.
            let Ok(at) = map[0].value("map memory to flush") else { continue };
            let mut unmap = [Call::new(libc::SYS_munmap, &[at, FLUSH_BYTES])];
            stub.run(tid, 0, &mut unmap)?;
            unmap[0].value("unmap memory to flush")?;
        }
        Ok(())
    }
}

/// The page tables of a process, checked by one of its pages that is in memory.
fn root_of(
    tables: &mut PageTables,
    pid: HostPid,
    pages: &Ranges,
) -> Result<Option<TableRoot>, KernelError> {
    let mut failed = Ok(None);
    // The first may be in swap, or have gone meanwhile.
    for (start, _) in pages.iter().take(16) {
        match tables.root(pid, start) {
            Ok(root) => return Ok(Some(root)),
            Err(error) => failed = Err(error),
        }
    }
    failed
}

impl Touches {
    /// When the next look is due.
    #[must_use]
    pub fn next_look(&self) -> Instant {
        self.began + Window::look_at(self.looks)
    }

    /// Whether the window has been open long enough.
    #[must_use]
    pub fn is_over(&self, window: &Window) -> bool {
        window.is_over(self.began.elapsed(), self.bytes, self.touched)
    }

    /// Looks what has been touched since the last time. How long the looking took.
    pub fn look(&mut self) -> ObjectResult<Duration> {
        let began = Instant::now();
        let mut spans = Vec::new();
        let tables = &mut self.tables;
        let mut gone = Vec::new();
        for (index, space) in self.spaces.iter_mut().enumerate() {
            match look_at(tables, space, &mut spans) {
                Ok(true) => {}
                Ok(false) => gone.push(index),
                Err(error) if error.is_died() => gone.push(index),
                Err(error) => return Err(error.into()),
            }
        }
        for index in gone.into_iter().rev() {
            self.spaces.remove(index);
        }
        self.looks += 1;
        if !spans.is_empty() {
            let until_ms = self.began.elapsed().as_millis().min(u128::from(u32::MAX)) as u32;
            let group = TouchGroup { until_ms, spans };
            self.touched += group.pages() * PAGE_BYTES;
            self.groups.push(group);
        }
        Ok(began.elapsed())
    }

    /// Closes the window. The page tables can be used for the next.
    #[must_use]
    pub fn end(self) -> (TouchSet, PageTables) {
        (TouchSet { groups: self.groups, has_reads: true, ..TouchSet::default() }, self.tables)
    }
}

/// False if the process has another address space now.
fn look_at(
    tables: &mut PageTables,
    space: &mut Tracked,
    spans: &mut Vec<Span>,
) -> Result<bool, KernelError> {
    if !tables.is_root_of(space.pid, space.root)? {
        return Ok(false);
    }
    let mut touched = Ranges::default();
    let left: Vec<(u64, u64)> = space.left.iter().collect();
    tables.touched(space.root, &left, &mut |start, end| touched.push(start, end))?;
    let touched = touched.common(&space.left);
    let owner = PageOwner::Mm(space.id);
    let span = |(start, end): (u64, u64)| Span { owner, start, pages: (end - start) / PAGE_BYTES };
    spans.extend(touched.iter().map(span));
    space.left = space.left.without(&touched);
    Ok(true)
}
