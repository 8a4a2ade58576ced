//! A ghost that goes live before its memory is there.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use hotspare_image::Checkpoint;
use hotspare_image::memory::{Backing, Mapping, MmId, PAGE_BYTES, PageOwner, mapping_flags};
use hotspare_image::source::{Block, BlockContent, PageSource, Span};
use hotspare_kernel::missing::{self, MissingPages};
use hotspare_kernel::pidfd;
use hotspare_kernel::ptrace::reg;

use super::body::Body;
use super::error::{GhostError, GhostResult};
use super::{Ghost, living};
use crate::capture::ranges::{Ranges, merge_sorted};
use crate::lazy::{Due, LazySpace, Loader, Plan, by_owner, spans_of};
use crate::pages::{Content, PageRun};

/// Below the stack pointer, a function may keep something (System V ABI for x86-64).
const RED_ZONE: u64 = 128;
/// Of a longer list of arguments, the rest comes late.
const VITAL_PAGES: u64 = 32;
/// In [`hotspare_image::memory::Layout::words`].
const ARG_START: usize = 7;
const ENV_END: usize = 10;
/// Mappings count as small, from the smallest on, as long as all of them have no more.
const SMALL_BYTES: u64 = 32 << 20;
/// Fetched with one request, of what cannot come late.
const EARLY_BYTES: u64 = 1 << 20;
/// Such requests under way at a time.
const EARLY_REQUESTS: usize = 8;

impl Ghost {
    /// Becomes the guest of a checkpoint whose pages are elsewhere, without waiting for all of
    /// them. The ghost must be new. `start` is given the loader, which it must let
    /// [run](Loader::run) on a thread of its own. On success the ghost may be finalised: what
    /// cannot come late is there, and so is what `plan` wants before the guest runs.
    pub fn apply_late(
        &mut self,
        checkpoint: Checkpoint,
        source: &dyn PageSource,
        plan: &Plan,
        start: impl FnOnce(Loader) -> std::io::Result<()>,
    ) -> GhostResult<()> {
        if self.image.is_some() {
            return Err(GhostError::Image("only a new ghost can be loaded late".into()));
        }
        self.take_on(&checkpoint)?;
        // Only those that were there before have it.
        self.set_subreapers(&checkpoint)?;
        let all = source.all();
        let places = late_places(&checkpoint);
        let mut late = BTreeMap::new();
        let mut early: Vec<Span> = Vec::new();
        for (owner, spans) in by_owner(&all) {
            let PageOwner::Mm(id) = owner else {
                early.extend(spans_of(owner, &spans));
                continue;
            };
            // An address space that no process has is of no use.
            let Some(places) = places.get(&id) else { continue };
            early.extend(spans_of(owner, &spans.without(places)));
            late.insert(id, spans.common(places));
        }
        let mut spaces = Vec::new();
        for body in self.bodies.values().filter(|body| !body.zombie) {
            let Some(id) = body.space else { continue };
            let Some(ranges) = late.get(&id).filter(|ranges| !ranges.is_empty()) else { continue };
            spaces.push(miss(body, id, ranges).map_err(GhostError::at(body.pid))?);
        }
        let mut plan = plan_of(&late, &vital(&checkpoint), plan);
        if let Some(at) = plan.small_before {
            let spans = in_small_mappings(&checkpoint, &late);
            plan.then.insert(at, Due { after: None, spans });
        }
        let pages = |spans: &[Span]| spans.iter().map(|span| span.pages).sum::<u64>();
        let then: Vec<u64> = plan.then.iter().map(|due| pages(&due.spans)).collect();
        tracing::debug!(first = pages(&plan.first), ?then, all = pages(&all), "plan, in pages");
        let loader = Loader::new(spaces, plan, all, self.init().host_pid())?;
        let progress = loader.progress();
        let failed = |source| GhostError::Io { verb: "load memory".into(), source };
        start(loader).map_err(failed)?;
        let filled = self.fill_from(source, &requests(&early, EARLY_BYTES));
        // If the loader has killed the ghost meanwhile, its reason is the one.
        progress.failure().map_or(filled, |why| Err(failed(std::io::Error::other(why))))?;
        self.end_zombies(&checkpoint)?;
        self.image = Some(checkpoint);
        progress.wait_for_start().map_err(|why| failed(std::io::Error::other(why)))
    }

    /// Fetches several requests at a time, and puts in what comes, in order.
    fn fill_from(&mut self, source: &dyn PageSource, wanted: &[Vec<Span>]) -> GhostResult<()> {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let (send, come) = mpsc::sync_channel(EARLY_REQUESTS);
            for _ in 0..EARLY_REQUESTS.min(wanted.len()) {
                let (send, next) = (send.clone(), &next);
                let reader = move || {
                    while let Some(wanted) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if send.send(source.read(wanted)).is_err() {
                            return;
                        }
                    }
                };
                let started = std::thread::Builder::new().spawn_scoped(scope, reader);
                started.map_err(GhostError::io("start a thread"))?;
            }
            drop(send);
            for blocks in come {
                let blocks = blocks.map_err(|error| GhostError::Io {
                    verb: "load memory".into(),
                    source: std::io::Error::other(error),
                })?;
                self.fill(&mut blocks.into_iter().filter_map(run_of))?;
            }
            Ok(())
        })
    }
}

/// What of a plan comes late; what is vital comes before all of it.
fn plan_of(late: &BTreeMap<MmId, Ranges>, vital: &[Span], plan: &Plan) -> Plan {
    let only_late = |spans: &[Span]| -> Vec<Span> {
        let each = spans.iter().flat_map(|span| {
            let PageOwner::Mm(id) = span.owner else { return Vec::new() };
            let Some(ranges) = late.get(&id) else { return Vec::new() };
            let within = ranges.within(span.start, span.end()).into_iter();
            let part = |(start, bytes): (u64, usize)| Span {
                start,
                pages: bytes as u64 / PAGE_BYTES,
                ..*span
            };
            within.map(part).collect()
        });
        each.collect()
    };
    let mut first = only_late(vital);
    first.extend(only_late(&plan.first));
    let due = |due: &Due| Due { after: due.after, spans: only_late(&due.spans) };
    Plan { first, then: plan.then.iter().map(due).collect(), ..*plan }
}

/// What comes late in the smallest mappings, these first.
fn in_small_mappings(checkpoint: &Checkpoint, late: &BTreeMap<MmId, Ranges>) -> Vec<Span> {
    let mut found: Vec<(u64, Vec<Span>)> = Vec::new();
    for space in &checkpoint.spaces {
        let Some(late) = late.get(&space.id) else { continue };
        for mapping in &space.mappings {
            let (start, end) = (mapping.range.start.0, mapping.range.end.0);
            let its = late.common(&merge_sorted(vec![(start, end)]));
            found.push((its.bytes(), spans_of(PageOwner::Mm(space.id), &its)));
        }
    }
    found.sort_by_key(|(bytes, _)| *bytes);
    let mut room = SMALL_BYTES;
    let fits = |(bytes, _): &(u64, _)| {
        let rest = room.checked_sub(*bytes);
        room = rest.unwrap_or(0);
        rest.is_some()
    };
    found.into_iter().take_while(fits).flat_map(|(_, spans)| spans).collect()
}

/// Registers what comes late.
fn miss(body: &Body, id: MmId, ranges: &Ranges) -> GhostResult<LazySpace> {
    let verb = "create userfaultfd in the ghost";
    let fd = body.batch().ask(verb, libc::SYS_userfaultfd, &[missing::FLAGS])?;
    let taken = pidfd::get_fd(body.pidfd.as_fd(), fd as i32);
    body.batch().ask("close userfaultfd in the ghost", libc::SYS_close, &[fd])?;
    let missing = MissingPages::new(taken?)?;
    let mut registered = Ranges::default();
    for mapping in body.layout.iter().filter(|mapping| comes_late(mapping)) {
        let (start, end) = (mapping.range.start.0, mapping.range.end.0);
        // All of a mapping or nothing: mremap(2) wants one, not several.
        if !ranges.within(start, end).is_empty() {
            missing.register(start, end)?;
            registered.push(start, end);
        }
    }
    let mut space = LazySpace::new(id, missing, registered);
    for (start, end) in ranges.iter() {
        space.pending.add(start, end);
    }
    Ok(space)
}

/// Memory in which nobody but a page fault of its own process can miss a page.
fn comes_late(mapping: &Mapping) -> bool {
    // What a child finds empty must not be brought in for it.
    let excluded = mapping_flags::DROPPABLE | mapping_flags::WIPE_ON_FORK;
    mapping.backing == Backing::Anonymous && mapping.flags & excluded == 0
}

/// Where memory may come late, by address space.
fn late_places(checkpoint: &Checkpoint) -> BTreeMap<MmId, Ranges> {
    let places = checkpoint.spaces.iter().map(|space| {
        let mappings = space.mappings.iter().filter(|mapping| comes_late(mapping));
        let mappings = mappings.map(|mapping| (mapping.range.start.0, mapping.range.end.0));
        (space.id, merge_sorted(mappings.collect()))
    });
    places.collect()
}

/// Pages that are brought in before the guest runs, whatever it will touch: what cannot come late,
/// and what its threads go on with. Also those of which a checkpoint has nothing.
#[must_use]
pub fn needed_at_once(checkpoint: &Checkpoint) -> Vec<Span> {
    let mut spans = vital(checkpoint);
    let span = |owner, start: u64, end: u64| Span {
        owner,
        start,
        pages: end.saturating_sub(start).div_ceil(PAGE_BYTES),
    };
    for space in &checkpoint.spaces {
        let early = space.mappings.iter().filter(|mapping| !comes_late(mapping));
        let owner = PageOwner::Mm(space.id);
        spans.extend(early.map(|m| span(owner, m.range.start.0, m.range.end.0)));
    }
    let shared = checkpoint.shared.iter();
    spans.extend(shared.map(|object| span(PageOwner::Shared(object.id), 0, object.bytes)));
    spans
}

/// What the first instruction of every thread needs, and who looks at the process (ps reads its
/// arguments, and is not made to wait for them).
fn vital(checkpoint: &Checkpoint) -> Vec<Span> {
    let mut spans = Vec::new();
    for (_, live) in living(checkpoint) {
        let owner = PageOwner::Mm(live.mm);
        let mut add = |from: u64, to: u64| {
            let start = from & !(PAGE_BYTES - 1);
            let pages = to.saturating_sub(start).div_ceil(PAGE_BYTES);
            spans.push(Span { owner, start, pages: pages.min(VITAL_PAGES) });
        };
        for thread in &live.threads {
            let stack = thread.registers[reg::RSP];
            add(stack.saturating_sub(RED_ZONE), stack.saturating_add(2 * PAGE_BYTES));
            let local = thread.registers[reg::FS_BASE];
            add(local.saturating_sub(PAGE_BYTES), local.saturating_add(PAGE_BYTES));
            for place in [thread.rseq[0], thread.robust_list[0], thread.clear_tid.0] {
                add(place, place.saturating_add(64));
            }
        }
        if let Some(space) = checkpoint.spaces.iter().find(|space| space.id == live.mm) {
            let words = &space.layout.words;
            add(words[ARG_START], words[ENV_END]);
        }
    }
    spans
}

/// Spans in groups of up to `bytes_max` bytes.
fn requests(spans: &[Span], bytes_max: u64) -> Vec<Vec<Span>> {
    let mut groups = vec![Vec::new()];
    let mut room = bytes_max / PAGE_BYTES;
    for span in spans {
        let mut rest = *span;
        while rest.pages > 0 {
            if room == 0 {
                groups.push(Vec::new());
                room = bytes_max / PAGE_BYTES;
            }
            let pages = rest.pages.min(room);
            if let Some(group) = groups.last_mut() {
                group.push(Span { pages, ..rest });
            }
            rest =
                Span { start: rest.start + pages * PAGE_BYTES, pages: rest.pages - pages, ..rest };
            room -= pages;
        }
    }
    groups.retain(|group| !group.is_empty());
    groups
}

fn run_of(block: Block) -> Option<PageRun> {
    let Span { owner, start, pages } = block.span;
    let content = match block.content {
        BlockContent::Bytes(bytes) => Content::Bytes(bytes),
        BlockContent::Zero => Content::Zero(pages),
        BlockContent::Absent => return None,
    };
    Some(PageRun { owner, start, content })
}
