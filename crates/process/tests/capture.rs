//! Capture of real programs: what the runs rebuild is what the guest holds.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use hotspare_image::Checkpoint;
use hotspare_image::memory::{Backing, MmId, PAGE_BYTES, PageOwner, mapping_flags};
use hotspare_image::tree::ProcessState;
use hotspare_kernel::memory::ProcMem;
use hotspare_kernel::pagemap::{Pagemap, Query, Region, category};
use hotspare_kernel::{HostPid, pidfd};
use hotspare_process::capture::shared::SharedTable;
use hotspare_process::capture::{Captured, CheckpointRules};
use hotspare_process::guest::Guest;
use hotspare_process::objects::error::ObjectError;
use hotspare_process::pages::{Content, PageRun};

/// A program that waits for a line before it begins, so that it can be seized first.
#[expect(clippy::zombie_processes, reason = "whoever traces it reaps it")]
fn begin(script: &str) -> Guest {
    let mut child = Command::new("sh")
        .args(["-c", &format!("read go; {script}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("spawns");
    let guest = Guest::seize(HostPid(child.id() as i32)).expect("seizes");
    child.stdin.as_mut().expect("has stdin").write_all(b"go\n").expect("writes");
    guest
}

fn end(mut guest: Guest) {
    guest.kill();
    while guest.is_alive() {
        guest.pump(&[], Duration::from_millis(20)).expect("pumps");
    }
}

/// What a spare would hold.
#[derive(Default)]
struct Model(BTreeMap<(PageOwner, u64), Vec<u8>>);

impl Model {
    fn apply(&mut self, captured: Captured, earlier: Vec<PageRun>) {
        for run in earlier.into_iter().chain(captured.runs) {
            for page in 0..run.pages() {
                let key = (run.owner, run.start + page * PAGE_BYTES);
                let at = (page * PAGE_BYTES) as usize;
                match &run.content {
                    Content::Bytes(bytes) => {
                        self.0.insert(key, bytes[at..at + PAGE_BYTES as usize].to_vec());
                    }
                    Content::Zero(_) | Content::Discard(_) => drop(self.0.remove(&key)),
                }
            }
        }
    }

    /// Pages held.
    fn count(&self, mm: MmId, start: u64, end: u64) -> usize {
        self.0.range((PageOwner::Mm(mm), start)..(PageOwner::Mm(mm), end)).count()
    }

    fn compare(&self, mm: MmId, pid: HostPid, start: u64, end: u64) -> usize {
        let mut pagemap = Pagemap::open(pid).expect("opens");
        let mut regions = Vec::new();
        let any_of = category::PRESENT | category::SWAPPED;
        let report = any_of | category::ZERO;
        let query = Query { any_of, report, ..Query::default() };
        pagemap.scan(start, end, query, &mut regions).expect("scans");
        let memory = ProcMem::open(pid).expect("opens");
        let mut page = vec![0u8; PAGE_BYTES as usize];
        let mut compared = 0;
        let mut wanted = self.count(mm, start, end);
        for region in regions {
            for at in (region.start..region.end).step_by(PAGE_BYTES as usize) {
                memory.read_exact(at, &mut page).expect("reads");
                let zero = page.iter().all(|byte| *byte == 0);
                match self.0.get(&(PageOwner::Mm(mm), at)) {
                    Some(held) => {
                        let first = held.iter().zip(&page).position(|(held, page)| held != page);
                        let pair = first.map(|at| (at, held[at], page[at]));
                        assert_eq!(pair, None, "page {at:#x} of {start:#x}-{end:#x} differs");
                        wanted -= 1;
                    }
                    None => assert!(zero, "page {at:#x} of {mm:?} is missing"),
                }
                compared += 1;
            }
        }
        assert_eq!(wanted, 0, "pages held that the guest does not have");
        compared
    }

    /// Pages of files are held only where the guest wrote; the others are as `file` has them.
    fn compare_held(
        &self,
        mm: MmId,
        pid: HostPid,
        (start, end): (u64, u64),
        file: impl FnOnce() -> Vec<u8>,
    ) -> usize {
        let memory = ProcMem::open(pid).expect("opens");
        let mut page = vec![0u8; PAGE_BYTES as usize];
        let owner = PageOwner::Mm(mm);
        let mut compared = 0;
        for ((_, at), held) in self.0.range((owner, start)..(owner, end)) {
            memory.read_exact(*at, &mut page).expect("reads");
            assert!(*held == page, "page {at:#x} of the file at {start:#x}-{end:#x} differs");
            compared += 1;
        }
        let own = not_of_the_file(pid, start, end).into_iter();
        let missing: Vec<u64> = own.filter(|at| !self.0.contains_key(&(owner, *at))).collect();
        let file = if missing.is_empty() { Vec::new() } else { file() };
        for at in missing {
            memory.read_exact(at, &mut page).expect("reads");
            let mut of_file = file[((at - start) as usize).min(file.len())..].to_vec();
            of_file.resize(page.len(), 0);
            assert!(of_file == page, "page {at:#x} of the file at {start:#x}-{end:#x} is missing");
        }
        compared
    }
}

/// Pages of a private mapping of a file that are the guest's own.
fn not_of_the_file(pid: HostPid, start: u64, end: u64) -> Vec<u64> {
    let mut pagemap = Pagemap::open(pid).expect("opens");
    let mut regions = Vec::new();
    let (any_of, own) = (category::PRESENT | category::SWAPPED, category::FILE);
    let query = Query { any_of, all_of: own, inverted: own, report: any_of, ..Query::default() };
    pagemap.scan(start, end, query, &mut regions).expect("scans");
    pagemap.without_markers(&mut regions).expect("reads");
    let pages = |region: Region| (region.start..region.end).step_by(PAGE_BYTES as usize);
    regions.into_iter().flat_map(pages).collect()
}

/// Takes `count` checkpoints and compares the model with the guest.
fn compare_checkpoints(guest: &mut Guest, count: usize) -> usize {
    compare_checkpoints_when(guest, count, |_| true)
}

/// The same with `count` checkpoints from the one on that is `ready`.
fn compare_checkpoints_when(
    guest: &mut Guest,
    count: usize,
    ready: impl Fn(&Checkpoint) -> bool,
) -> usize {
    let mut model = Model::default();
    let mut taken = 0;
    while taken < count {
        guest.pump(&[], Duration::from_millis(7)).expect("pumps");
        assert!(guest.is_alive(), "the guest has ended");
        match guest.prepare() {
            Ok(()) => {}
            Err(ObjectError::Transient { .. }) => continue,
            Err(error) => panic!("{error}"),
        }
        let mut early = Vec::new();
        guest.scan().expect("scans");
        guest.precopy(1 << 30, &mut early).expect("copies");
        let mut nothing = |_: &Guest, _: &mut SharedTable, _: &mut Checkpoint| Ok(());
        let mut rules = CheckpointRules { objects: &mut nothing, copy_all: false };
        let captured = match guest.checkpoint(u64::MAX, &mut rules, &mut || Ok(())) {
            Ok(Some(captured)) => captured,
            Ok(None) | Err(ObjectError::Transient { .. }) => {
                // What was copied early belongs to this epoch all the same.
                model.apply(empty(), early);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        taken += usize::from(taken > 0 || ready(&captured.checkpoint));
        model.apply(captured, early);
    }
    // A last look with nothing running afterwards. Describing comes first: it lets threads run
    // calls of ours, and the kernel may write their processor number into their memory then.
    let mut early = Vec::new();
    let mut look = |guest: &mut Guest| {
        let captured = guest.describe_stopped().expect("describes");
        guest.scan_stopped().expect("scans");
        guest.precopy(u64::MAX, &mut early).expect("copies");
        model.apply(empty(), std::mem::take(&mut early));
        compare_all(&model, guest, &captured)
    };
    loop {
        guest.pump(&[], Duration::from_millis(3)).expect("pumps");
        match guest.freeze(&mut look) {
            Ok(compared) => return compared,
            Err(ObjectError::Transient { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Compares every page of anonymous memory of the stopped guest, and what is held of its private
/// mappings of files; returns how many.
fn compare_all(model: &Model, guest: &Guest, captured: &Checkpoint) -> usize {
    let mut compared = 0;
    for space in &captured.spaces {
        let process = captured.processes.iter().find(
            |process| matches!(&process.state, ProcessState::Alive(live) if live.mm == space.id),
        );
        let pid = guest.host_pid(process.expect("has a process").pid).expect("is alive");
        for mapping in &space.mappings {
            let (start, end) = (mapping.range.start.0, mapping.range.end.0);
            compared += match mapping.backing {
                // Does not travel, and has to be empty where it arrives.
                Backing::Anonymous if mapping.flags & mapping_flags::DROPPABLE != 0 => {
                    assert_eq!(model.count(space.id, start, end), 0, "held at {start:#x}");
                    0
                }
                Backing::Anonymous => model.compare(space.id, pid, start, end),
                Backing::PrivateFile { ref file, offset } => {
                    let of_file = || {
                        let bytes = std::fs::read(&file.path.0).expect("reads the file");
                        bytes[(offset as usize).min(bytes.len())..].to_vec()
                    };
                    model.compare_held(space.id, pid, (start, end), of_file)
                }
                _ => 0,
            };
        }
    }
    compared
}

fn empty() -> Captured {
    Captured { checkpoint: Default::default(), runs: Vec::new(), parts: Default::default() }
}

const CHURN: &str = r#"
import mmap, os, random, threading, ctypes
random.seed(int(os.environ.get("SEED", "1")))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
P = 4096
areas = []
def churn():
    while True:
        what = random.randrange(7)
        if what == 0 or not areas:
            n = random.randrange(1, 64)
            areas.append([libc.mmap(None, n * P, 3, 0x22, -1, 0), n])
            continue
        area = random.choice(areas)
        a, n = area
        page = random.randrange(n)
        if what in (1, 2):
            for _ in range(8):
                at = a + random.randrange(n) * P + random.randrange(P)
                ctypes.memset(at, random.randrange(256), 1)
        elif what == 3:
            libc.madvise(a + page * P, random.randrange(1, n - page + 1) * P, 4)
        elif what == 4 and len(areas) > 20:
            libc.munmap(a, n * P); areas.remove(area)
        elif what == 5:
            m = random.randrange(1, 64)
            moved = libc.mremap(a, n * P, m * P, 1)
            if moved != 2**64 - 1: area[0] = moved; area[1] = m
        elif what == 6:
            libc.mprotect(a + page * P, P, 1); libc.mprotect(a + page * P, P, 3)
churn()
"#;

/// Runs a program that does by chance what it can think of under so many checkpoints, and compares
/// at least so many pages.
fn compare_storm(program: &str, checkpoints: usize, least: usize) {
    let seed = std::process::id();
    println!("SEED={seed}");
    let mut guest = begin(&format!("SEED={seed} exec /usr/bin/python3 -c '{program}'"));
    let compared = compare_checkpoints(&mut guest, checkpoints);
    assert!(compared > least && guest.is_alive(), "{compared} pages compared");
    end(guest);
}

#[test]
fn what_the_runs_rebuild_is_what_the_guest_holds() {
    compare_storm(CHURN, 60, 500);
}

#[test]
fn children_that_come_and_go_do_not_disturb_the_capture() {
    let mut guest = begin("while :; do /bin/true; x=$(echo a | cat); done");
    let compared = compare_checkpoints(&mut guest, 60);
    assert!(compared > 0, "no page compared");
    end(guest);
}

/// Memory large enough to have page tables of its own: what is discarded may take them along, and
/// so does moving without unmapping (`MREMAP_DONTUNMAP`).
const TABLES: &str = r#"
import ctypes, os, random, time
random.seed(int(os.environ.get("SEED", "1")))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] * 2 + [ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
P, T = 4096, 2 << 20
N = 5 * T
areas = [libc.mmap(None, N, 3, 0x22, -1, 0) for _ in range(2)]
while True:
    i = random.randrange(len(areas))
    a = areas[i]
    table = (a + T - 1) // T * T + random.randrange(4) * T
    what = random.randrange(12)
    if what < 6:
        for _ in range(20):
            ctypes.memset(a + random.randrange(N), random.randrange(256), 1)
    elif what < 8:
        for _ in range(20):
            ctypes.string_at(a + random.randrange(N), 1)
    elif what == 8:
        libc.madvise(table, T, 4)
        time.sleep(random.random() / 50)
    elif what == 9:
        libc.madvise(a + random.randrange(1000) * P, random.randrange(1, 600) * P, 4)
    elif what == 10:
        ctypes.memset(table + random.randrange(512) * P, 7, random.randrange(1, 300))
    else:
        moved = libc.mremap(a, N, N, 5)
        if moved != 2**64 - 1:
            if random.randrange(2): libc.munmap(a, N)
            else: areas.append(a)
            areas[i] = moved
        if len(areas) > 6: libc.munmap(areas.pop(0), N)
"#;

#[test]
fn what_goes_with_its_page_table_is_not_kept() {
    compare_storm(TABLES, 100, 500);
}

/// What the programs below share: calls, and how to see that a scan has found a page.
const MAPPER: &str = r#"
import ctypes, os, time
libc = ctypes.CDLL(None)
for call in (libc.mmap, libc.mremap):
    call.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mremap.argtypes = [ctypes.c_void_p] + [ctypes.c_size_t] * 2 + [ctypes.c_int, ctypes.c_void_p]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
P = 4096
pages = open("/proc/self/pagemap", "rb", 0)
def await_tracked(at):
    tracked = False
    while not tracked:
        pages.seek(at // P * 8)
        tracked = int.from_bytes(pages.read(8), "little") >> 57 & 1
def await_copied(at):
    for byte in b"123":
        ctypes.memset(at, byte, 1)
        await_tracked(at)
def done():
    libc.prctl(15, b"done", 0, 0, 0)
def rest():
    done()
    while True:
        time.sleep(1)
"#;

/// Runs such a program under checkpoints until some have been taken after it was done, and compares
/// its memory with what they say.
fn compare_mapper(program: &str) {
    let mut guest = begin(&format!("exec /usr/bin/python3 -c '{MAPPER}{program}'"));
    let done = |checkpoint: &Checkpoint| {
        checkpoint.processes.iter().any(|process| match &process.state {
            ProcessState::Alive(live) => live.threads.iter().any(|thread| thread.name == b"done"),
            ProcessState::Zombie { .. } => false,
        })
    };
    let compared = compare_checkpoints_when(&mut guest, 20, done);
    assert!(compared > 0 && guest.is_alive(), "{compared} pages compared");
    end(guest);
}

/// Waits until a page is tracked, moves an untouched mapping next to it, which ends the tracking of
/// both, and writes to the page forever.
const JOIN: &str = r#"
a = libc.mmap(None, 16 * P, 3, 0x22, -1, 0)
libc.munmap(a + 4 * P, 8 * P)
ctypes.memset(a, 1, 4 * P)
await_tracked(a)
assert libc.mremap(a + 12 * P, 4 * P, 4 * P, 3, a + 4 * P) == a + 4 * P
done()
n = 0
while True:
    n += 1
    ctypes.memset(a + n % 4 * P, n // 4 % 255 + 1, 8)
"#;

#[test]
fn a_mapping_that_loses_its_tracking_by_a_move_next_to_it_loses_no_write() {
    compare_mapper(JOIN);
}

/// Private mappings of a file, small and large, of which parts are written to, read, given back,
/// put out of memory, protected, moved, and mapped anew.
const FILES: &str = r#"
import random
random.seed(int(os.environ.get("SEED", "1")))
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
exe = os.open("/proc/self/exe", os.O_RDONLY)
ALL = os.fstat(exe).st_size // P
areas = []
def place(n):
    return random.randrange(ALL - n) * P
def churn():
    what = random.randrange(14)
    if what == 0 or len(areas) < 3:
        n = random.choice((random.randrange(1, 40), random.randrange(500, 1500)))
        areas.append([libc.mmap(None, n * P, 3, 2, exe, place(n)), n])
        return
    area = random.choice(areas)
    a, n = area
    page = random.randrange(n)
    part = a + page * P
    some = random.randrange(1, min(n - page, 600) + 1)
    if what < 4:
        for _ in range(8):
            at = a + random.randrange(n) * P + random.randrange(P)
            ctypes.memset(at, random.randrange(256), 1)
    elif what < 8:
        for _ in range(8):
            ctypes.string_at(a + random.randrange(n) * P, 1)
    elif what < 10:
        libc.madvise(part, some * P, random.choice((4, 4, 21)))
    elif what == 10:
        libc.mprotect(part, some * P, 1)
        libc.mprotect(part, some * P, 3)
    elif what == 11 and len(areas) > 8:
        libc.munmap(a, n * P)
        areas.remove(area)
    elif what == 12:
        to = libc.mmap(None, (n - page) * P, 0, 0x22, -1, 0)
        if libc.mremap(a, n * P, (n - page) * P, 3, to) == to:
            area[:] = to, n - page
        else:  # It is several mappings, of which some may have moved.
            libc.munmap(a, n * P)
            libc.munmap(to, (n - page) * P)
            areas.remove(area)
    elif what == 13:
        libc.mmap(part, some * P, 3, 0x12, exe, place(some))
while True:
    churn()
"#;

#[test]
fn what_is_written_over_a_file_is_all_that_travels_of_it() {
    compare_storm(&format!("{MAPPER}{FILES}"), 100, 100);
}

/// Writes to a private mapping of a file, waits until that is tracked and has been copied, and
/// gives pages back, of which it reads some again.
const GIVE_BACK: &str = r#"
a = libc.mmap(None, 16 * P, 3, 2, os.open("/proc/self/exe", os.O_RDONLY), 0)
ctypes.memset(a, 1, 16 * P)
await_copied(a)
libc.madvise(a, 12 * P, 4)
ctypes.string_at(a, 4 * P)
rest()
"#;

#[test]
fn a_page_of_a_file_that_is_given_back_shows_the_file_again() {
    compare_mapper(GIVE_BACK);
}

/// Writes to a private mapping of a file that is tracked and has been copied, and maps another one
/// right behind it, which is not.
const BEHIND: &str = r#"
exe = os.open("/proc/self/exe", os.O_RDONLY)
a = libc.mmap(None, 32 * P, 0, 0x22, -1, 0)
assert libc.mmap(a, 16 * P, 3, 0x12, exe, 0) == a
ctypes.memset(a, 1, 16 * P)
await_copied(a)
ctypes.memset(a, 7, 4 * P)
assert libc.mmap(a + 16 * P, 16 * P, 3, 0x12, exe, 0) == a + 16 * P
rest()
"#;

#[test]
fn no_write_is_lost_where_a_new_mapping_of_a_file_comes_behind_the_one_that_has_it() {
    compare_mapper(BEHIND);
}

/// Maps droppable memory where ordinary memory was that has been copied.
const DROP: &str = r#"
a = libc.mmap(None, 16 * P, 3, 0x22, -1, 0)
ctypes.memset(a, 1, 16 * P)
await_copied(a)
assert libc.mmap(a, 16 * P, 3, 0x38, -1, 0) == a, "MAP_DROPPABLE needs Linux 6.11"
ctypes.memset(a, 2, 4 * P)
rest()
"#;

#[test]
fn nothing_is_kept_of_what_stood_where_memory_is_droppable_now() {
    compare_mapper(DROP);
}

/// Maps over a smaller mapping and what was beside it, and moves that; dies if it cannot.
const OVER: &str = r#"
N = 16
place = libc.mmap(None, 8 * N * P, 0, 0x22, -1, 0) + N * P
other = place + 4 * N * P
while True:
    libc.mmap(place + N * P, N * P, 3, 0x32, -1, 0)
    libc.mmap(place, 2 * N * P, 3, 0x32, -1, 0)
    if libc.mremap(place, 2 * N * P, 2 * N * P, 3, other) != other:
        os._exit(1)
"#;

/// Tracking begins mapping by mapping, and a mapping of which a part is tracked is two to the
/// kernel: mremap(2) over both fails.
#[test]
fn a_scan_of_a_running_guest_leaves_its_mappings_whole() {
    let mut guest = begin(&format!("exec /usr/bin/python3 -c '{MAPPER}{OVER}'"));
    let mut runs = Vec::new();
    for round in 0..2000 {
        guest.pump(&[], Duration::ZERO).expect("pumps");
        assert!(guest.is_alive(), "mremap(2) failed after {round} scans");
        if guest.needs_preparation() {
            guest.prepare().expect("prepares");
        }
        guest.scan().expect("scans");
        guest.precopy(u64::MAX, &mut runs).expect("copies");
        runs.clear();
        if round % 50 == 49 {
            checkpoint(&mut guest);
        }
    }
    end(guest);
}

/// Tries until no passing state is in the way.
fn checkpoint(guest: &mut Guest) -> Captured {
    let mut nothing = |_: &Guest, _: &mut SharedTable, _: &mut Checkpoint| Ok(());
    let mut rules = CheckpointRules { objects: &mut nothing, copy_all: false };
    loop {
        guest.pump(&[], Duration::from_millis(5)).expect("pumps");
        assert!(guest.is_alive(), "the guest has ended");
        match guest.checkpoint(u64::MAX, &mut rules, &mut || Ok(())) {
            Err(ObjectError::Transient { .. }) => {}
            taken => return taken.expect("takes").expect("little is left"),
        }
    }
}

/// A process that is killed while it stands still begins to leave at once: its robust mutexes are
/// handed on in memory that is being copied. Such a checkpoint must not be.
#[test]
fn a_process_killed_in_the_pause_spoils_the_checkpoint() {
    for stays_held in [false, true] {
        let mut guest = begin("sleep 1000 & sleep 2000 & wait");
        while guest.processes().count() < 3 {
            guest.pump(&[], Duration::from_millis(5)).expect("pumps");
        }
        checkpoint(&mut guest);
        let victim = guest.processes().last().expect("a child");
        let mut kill = || {
            let victim = nix::unistd::Pid::from_raw(victim.0);
            nix::sys::signal::kill(victim, nix::sys::signal::SIGKILL).expect("kills");
            Ok(())
        };
        guest.hold_after_checkpoint(stays_held);
        let mut nothing = |_: &Guest, _: &mut SharedTable, _: &mut Checkpoint| Ok(());
        let mut rules = CheckpointRules { objects: &mut nothing, copy_all: false };
        let spoilt = guest.checkpoint(u64::MAX, &mut rules, &mut kill);
        assert!(matches!(spoilt, Err(ObjectError::Transient { .. })), "{spoilt:?}");
        assert!(!guest.is_held());
        let next = checkpoint(&mut guest).checkpoint;
        let lives = |state: &ProcessState| matches!(state, ProcessState::Alive(_));
        let alive = next.processes.iter().filter(|process| lives(&process.state)).count();
        assert_eq!((alive, guest.is_held()), (2, stays_held));
        if stays_held {
            guest.thaw().expect("thaws");
        }
        end(guest);
    }
}

/// What cannot be read of a process that is being killed is no reason to say that it cannot be
/// protected.
#[test]
fn an_error_of_a_process_killed_in_the_pause_passes() {
    let mut guest = begin("sleep 1000 & sleep 2000 & wait");
    while guest.processes().count() < 3 {
        guest.pump(&[], Duration::from_millis(5)).expect("pumps");
    }
    checkpoint(&mut guest);
    let victim = guest.processes().last().expect("a child");
    let mut read_it = |guest: &Guest, _: &mut SharedTable, _: &mut Checkpoint| {
        let number = nix::unistd::Pid::from_raw(victim.0);
        nix::sys::signal::kill(number, nix::sys::signal::SIGKILL).expect("kills");
        let of = guest.pidfd(victim).expect("known");
        loop {
            pidfd::get_fd(of, 0).map_err(ObjectError::kernel("descriptor 0"))?;
        }
    };
    let mut rules = CheckpointRules { objects: &mut read_it, copy_all: false };
    let spoilt = guest.checkpoint(u64::MAX, &mut rules, &mut || Ok(()));
    assert!(matches!(spoilt, Err(ObjectError::Transient { .. })), "{spoilt:?}");
    checkpoint(&mut guest);
    end(guest);
}
