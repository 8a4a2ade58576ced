//! Restarts that do not wait for their memory.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hotspare_image::Checkpoint;
use hotspare_image::memory::PAGE_BYTES;
use hotspare_image::source::PageSource;
use hotspare_process::lazy::{Loaded, Plan};
use hotspare_process::pages::PageRun;

use super::scenes;
use super::stored::Stored;
use super::world::{Loading, Primary, Spare};

/// A line that takes its time.
pub fn line(checkpoint: &(Checkpoint, Vec<PageRun>), megabytes_per_second: u64) -> Stored {
    let mut stored = Stored::default();
    stored.delay = Duration::from_millis(3);
    stored.bytes_per_second = megabytes_per_second << 20;
    stored.take(&checkpoint.1);
    stored
}

/// The guest dies, and is started from what was stored.
fn restart(mut primary: Primary, megabytes_per_second: u64) -> (Primary, Loading) {
    let first = primary.checkpoint();
    let stored = line(&first, megabytes_per_second);
    primary.die();
    Spare::start(&first.0).restart_late(first.0, Arc::new(stored), &Plan::default())
}

/// Lets the guest run until all its memory has come.
pub fn load(primary: &mut Primary, loading: Loading) -> Loaded {
    while !loading.thread.is_finished() {
        primary.run_for(Duration::from_millis(5));
    }
    loading.thread.join().expect("does not panic").expect("loads")
}

const HOLDS_MUCH: &str = "
import hashlib, os, time
blocks = [os.urandom(1 << 20) for _ in range(48)]
sums = [hashlib.md5(block).digest() for block in blocks]
i = 0
while True:
    print(i, 'ok' if hashlib.md5(blocks[i % 48]).digest() == sums[i % 48] else 'LOST', flush=True)
    i += 1
    time.sleep(0.001)
";

pub fn runs_before_it_is_loaded() {
    let mut primary = Primary::start(&["python3", "-c", HOLDS_MUCH]);
    primary.run_until("60 ok");
    let (mut primary, loading) = restart(primary, 64);
    let mut next: u64 = primary.line().split(' ').next().and_then(|n| n.parse().ok()).expect("n");
    assert!(!loading.progress.is_done(), "all memory was there before the first line");
    for _ in 0..100 {
        next += 1;
        assert_eq!(primary.line(), format!("{next} ok"));
    }
    let loaded = load(&mut primary, loading);
    assert!(loaded.bytes >= 48 << 20, "{loaded:?}");
    // It can be protected again, and moves like any other.
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    spare.apply(primary.checkpoint());
    primary.die();
    let mut primary = spare.take_over();
    for _ in 0..60 {
        assert!(primary.line().ends_with(" ok"));
    }
}

const CHANGES: &str = "
import mmap, os, signal, threading, time
SIZE, COUNT, PAGE = 1 << 19, 96, 4096
def page(area, number):
    return (b'%d %d ' % (area, number)) * 1100
def content(area, begin=0, end=SIZE // PAGE):
    return b''.join(page(area, n)[:PAGE] for n in range(begin, end))
areas = []
for i in range(COUNT):
    area = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = content(i)
    areas.append(area)
    # Neighbours do not become one mapping.
    hole = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    areas.append(hole)
areas = areas[::2]
def reads(i):
    return areas[i][:] == content(i)
def forks(i):
    pid = os.fork()
    if pid == 0:
        good = areas[i][:] == content(i) and areas[(i + 7) % COUNT] is not None
        areas[i][:PAGE] = b'x' * PAGE
        grandchild = os.fork()
        if grandchild == 0:
            good = areas[i][PAGE:] == content(i, 1) and areas[i][:PAGE] == b'x' * PAGE
            os._exit(0 if good else 1)
        good = good and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if good else 1)
    good = areas[i][:] == content(i)
    return os.waitpid(pid, 0)[1] == 0 and good
def forks_and_discards(i):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.02)
        os._exit(0 if areas[i][:] == content(i) else 1)
    areas[i].madvise(mmap.MADV_DONTNEED)
    return areas[i][:] == bytes(SIZE) and os.waitpid(pid, 0)[1] == 0
def moves(i):
    areas[i].resize(SIZE * 3)
    return areas[i][:SIZE] == content(i) and areas[i][SIZE:] == bytes(SIZE * 2)
def shrinks(i):
    areas[i].resize(SIZE // 2)
    good = areas[i][:] == content(i, 0, SIZE // PAGE // 2)
    areas[i].resize(SIZE)
    return good and areas[i][SIZE // 2:] == bytes(SIZE // 2)
def discards(i):
    half = SIZE // 2
    areas[i].madvise(mmap.MADV_DONTNEED, half, half)
    return areas[i][half:] == bytes(half) and areas[i][:half] == content(i, 0, half // PAGE)
def calls(i):
    r, w = os.pipe()
    view = memoryview(areas[i])
    good = os.write(w, view[5 * PAGE:6 * PAGE]) == PAGE
    good = good and os.readv(r, [view[9 * PAGE:10 * PAGE]]) == PAGE
    view.release()
    os.close(r), os.close(w)
    want = content(i, 0, 9) + page(i, 5)[:PAGE] + content(i, 10)
    return good and areas[i][:] == want
def threads(i):
    results = []
    def one(n):
        results.append(areas[i][n * PAGE:(n + 1) * PAGE] == page(i, n)[:PAGE])
    all = [threading.Thread(target=one, args=(n * 16,)) for n in range(8)]
    [t.start() for t in all], [t.join() for t in all]
    return results == [True] * 8
seen = []
def handler(*_):
    seen.append(areas[at][3 * PAGE:4 * PAGE] == page(at, 3)[:PAGE])
signal.signal(signal.SIGALRM, handler)
def signals(i):
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    time.sleep(0.004)
    return seen.pop()
def unmaps(i):
    areas[i].close()
    fresh = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    good = fresh[:] == bytes(SIZE)
    areas[i] = fresh
    return good
steps = [reads, forks, moves, discards, calls, threads, signals, unmaps, shrinks]
steps.append(forks_and_discards)
print('ready', flush=True)
for turn in range(COUNT):
    # From the far end as well, where nothing has come yet.
    at = COUNT - 1 - turn // 2 if turn % 2 else turn // 2
    step = steps[turn % len(steps)]
    print('ok' if step(at) else 'WRONG ' + step.__name__ + ' ' + str(at), flush=True)
    time.sleep(0.005)
print('end', flush=True)
time.sleep(100)
";

const FOLLOWS: &str = "
import ctypes, mmap, random, time
PAGES, NODES = 16384, 24
area = mmap.mmap(-1, PAGES * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for n in range(PAGES):
    area[n * 4096:n * 4096 + 4] = b'used'
places = random.Random(7).sample(range(PAGES), 2 * NODES)
nodes = [start + n * 4096 + 1000 for n in places[:NODES]]
values = [start + n * 4096 + 2000 for n in places[NODES:]]
word = lambda at: ctypes.c_uint64.from_address(at)
for i in range(NODES):
    word(nodes[i]).value = values[i]
    word(nodes[i] + 8).value = nodes[i + 1] if i + 1 < NODES else 0
    word(values[i]).value = i
while True:
    at, seen = nodes[0], []
    while at:
        seen.append(word(word(at).value).value)
        at = word(at + 8).value
    print('ok' if seen == list(range(NODES)) else seen, flush=True)
    time.sleep(0.2)
";

/// Whoever goes along a list waits for a node, and then for what it points to and the next one at
/// a time.
pub fn follows_pointers() {
    const AREA: u64 = 16384 * PAGE_BYTES;
    let mut primary = Primary::start(&["python3", "-c", FOLLOWS]);
    primary.run_until("ok");
    let first = primary.checkpoint();
    let mut stored = line(&first, 16);
    stored.delay = Duration::from_millis(20);
    primary.die();
    let spare = Spare::start(&first.0);
    let area = super::touch::area_of(&first.0, AREA);
    let (mut primary, loading) = spare.restart_late(first.0, Arc::new(stored), &Plan::default());
    assert_eq!(primary.line(), "ok");
    let loaded = load(&mut primary, loading);
    let missed = loaded.missed.iter().filter(|span| (area..area + AREA).contains(&span.start));
    // What comes behind meanwhile is not waited for.
    assert!(missed.count() > 0 && loaded.pointed > 0, "{loaded:?}");
}

pub fn changes_while_it_comes() {
    let mut primary = Primary::start(&["python3", "-c", CHANGES]);
    primary.run_until("ready");
    primary.run_until("ok");
    let (mut primary, loading) = restart(primary, 32);
    let mut ok = 0;
    loop {
        let line = primary.line();
        match line.as_str() {
            "ok" => ok += 1,
            "end" => break,
            _ => panic!("{line}"),
        }
    }
    assert!(ok > 80, "{ok}");
    let loaded = load(&mut primary, loading);
    assert!(!loaded.missed.is_empty() && loaded.empty > 0, "{loaded:?}");
}

pub fn stopped_without_memory() {
    let mut primary = Primary::start(&["python3", "-c", HOLDS_MUCH]);
    primary.run_until("60 ok");
    let first = primary.checkpoint();
    let mut stored = line(&first, 64);
    stored.requests_max = Some(40);
    primary.die();
    let spare = Spare::start(&first.0);
    let (mut primary, loading) = spare.restart_late(first.0, Arc::new(stored), &Plan::default());
    while primary.guest.is_alive() {
        primary.run_for(Duration::from_millis(5));
    }
    let failure = loading.thread.join().expect("does not panic").expect_err("has no memory");
    assert!(failure.to_string().contains("the line is dead"), "{failure}");
    let (why, lives) = loading.lost.recv().expect("was told");
    assert!(lives && why.contains("the line is dead"), "{why}, {lives}");
    let rest = primary.die();
    assert!(!rest.contains("LOST"), "{rest}");
}

/// It does not start if what it needs for that cannot be had.
pub fn not_started_without_memory() {
    let mut primary = Primary::start(&["python3", "-c", HOLDS_MUCH]);
    primary.run_until("60 ok");
    let first = primary.checkpoint();
    let mut stored = line(&first, 64);
    stored.requests_max = Some(8);
    primary.die();
    let plan = Plan { first: stored.all(), ..Plan::default() };
    let spare = Spare::start(&first.0);
    let error = spare.try_restart_late(first.0, Arc::new(stored), &plan).err();
    let error = error.expect("it has no memory");
    assert!(error.contains("the line is dead"), "{error}");
}

/// A program of guests/ is restarted in the middle of its steps, several times.
pub fn guest_program(mut primary: Primary, hops: u64, name: &str, directory: &str) -> ExitCode {
    for _ in 0..hops {
        let first = primary.checkpoint();
        let stored = line(&first, 16);
        primary.die();
        let spare = Spare::start_in(&first.0, Some(directory));
        let (next, loading) = spare.restart_late(first.0, Arc::new(stored), &Plan::default());
        primary = next;
        let bytes = loading.progress.bytes_left();
        let loaded = load(&mut primary, loading);
        println!("{name}: {} KiB late, {loaded:?}", bytes >> 10);
        primary.run_for(Duration::from_millis(100));
    }
    scenes::finish(primary, name, directory)
}
