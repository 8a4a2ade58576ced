//! The scenes. Each is a claim; a panic refutes it.

use std::process::ExitCode;
use std::time::Duration;

use hotspare_image::tree::GuestPid;

use super::late;
use super::touch;
use super::world::{Primary, Spare};

type Scene = fn();

const SCENES: &[(&str, Scene)] = &[
    ("a_program_runs_before_its_memory_is_there", late::runs_before_it_is_loaded),
    ("what_a_page_points_to_where_it_is_waited_for_comes_at_once", late::follows_pointers),
    ("what_is_forked_moved_and_discarded_while_it_comes_is_right", late::changes_while_it_comes),
    ("what_is_read_is_in_the_touch_set", touch::what_is_read_is_in_the_touch_set),
    ("a_guest_whose_memory_is_lost_is_stopped", late::stopped_without_memory),
    ("a_guest_whose_memory_cannot_be_had_does_not_start", late::not_started_without_memory),
    ("the_program_that_is_awaited_has_descriptors_of_its_own_only", awaited),
    ("a_counting_program_counts_on", counts_on),
    ("a_full_copy_in_pieces_is_not_wiped_by_its_last_step", fills),
    ("a_pipeline_of_shells_goes_on_through_three_hosts", pipeline_goes_on),
    ("orphans_have_the_parents_that_the_guest_gave_them", orphans),
    ("threads_and_memory_survive_fifty_increments", memory_survives),
    ("endless_waits_see_no_stop", waits_on),
    ("interrupted_calls_go_on_after_two_takeovers_and_an_ignored_signal", restarts_twice),
    ("a_ghost_that_is_dropped_leaves_no_process", dropped_ghost_is_gone),
];

pub fn names() -> impl Iterator<Item = &'static str> {
    SCENES.iter().map(|(name, _)| *name)
}

pub fn run(name: &str) -> ExitCode {
    match SCENES.iter().find(|(known, _)| *known == name) {
        Some((_, scene)) => {
            scene();
            ExitCode::SUCCESS
        }
        None if name.contains('/') => guest_program(name),
        None => ExitCode::FAILURE,
    }
}

/// A program of guests/ is moved in the middle of its steps and must pass.
fn guest_program(path: &str) -> ExitCode {
    let name = path.rsplit('/').next().unwrap_or(path);
    let directory = format!("/tmp/hotspare-ghost/{}/{name}", std::process::id());
    std::fs::create_dir_all(&directory).expect("makes directory");
    let out = format!("{directory}/out");
    let number = |name: &str, usual| {
        std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(usual)
    };
    let mut primary = Primary::start_in(&[path, &out], Some(&directory));
    primary.run_for(Duration::from_millis(150));
    if std::env::var_os("LATE").is_some() {
        let hops = number("HOPS", 2);
        return late::guest_program(primary, hops, name, &directory);
    }
    for _ in 0..number("HOPS", 2) {
        let first = primary.checkpoint();
        let mut spare = Spare::start_in(&first.0, Some(&directory));
        spare.apply(first);
        for _ in 0..number("EPOCHS", 6) {
            primary.run_for(Duration::from_millis(number("EPOCH_MS", 17)));
            spare.apply(primary.checkpoint());
        }
        primary.die();
        primary = spare.take_over();
    }
    finish(primary, name, &directory)
}

/// Lets a program of guests/ come to its end; it must pass.
pub fn finish(mut primary: Primary, name: &str, directory: &str) -> ExitCode {
    let out = format!("{directory}/out");
    while primary.guest.root_status().is_none() {
        primary.run_for(Duration::from_millis(20));
    }
    let status = primary.guest.root_status();
    let text = std::fs::read_to_string(&out).unwrap_or_default();
    if status != Some(0) || !text.ends_with("PASS\n") {
        let tail: Vec<&str> = text.lines().rev().take(3).collect();
        println!("{name}: status {status:?}, output ends {tail:?}");
        return ExitCode::FAILURE;
    }
    let _ = std::fs::remove_dir_all(directory);
    ExitCode::SUCCESS
}

const COUNTER: &str = "
import time
i = 0
while True:
    i += 1
    print(i, flush=True)
    time.sleep(0.003)
";

fn counts_on() {
    let mut primary = Primary::start(&["python3", "-c", COUNTER]);
    primary.run_until("20");
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    primary.run_for(Duration::from_millis(50));
    spare.apply(primary.checkpoint());
    primary.run_for(Duration::from_millis(20));
    let last: u64 = primary.die().lines().last().expect("a line").parse().expect("a number");
    let mut taken = spare.take_over();
    let mut line = || -> u64 { taken.line().parse().expect("a number") };
    let begin = line();
    assert!(begin > 20 && begin <= last + 1, "goes on at {begin}, had printed {last}");
    for next in begin + 1..begin + 50 {
        assert_eq!(line(), next);
    }
}

fn fills() {
    let mut primary = Primary::start(&["python3", "-c", COUNTER]);
    primary.run_until("20");
    let first = primary.checkpoint();
    assert!(first.0.spaces.iter().any(|space| !space.fresh.is_empty()), "nothing is new");
    let mut spare = Spare::start(&first.0);
    spare.fill(first);
    let last: u64 = primary.die().lines().last().expect("a line").parse().expect("a number");
    let mut taken = spare.take_over();
    let begin: u64 = taken.line().parse().expect("a number");
    assert!(begin > 20 && begin <= last + 1, "goes on at {begin}, had printed {last}");
}

/// Moves the guest to another host after `epochs` increments.
fn moved(mut primary: Primary, epochs: usize) -> Primary {
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    for _ in 0..epochs {
        primary.run_for(Duration::from_millis(5));
        spare.apply(primary.checkpoint());
    }
    primary.die();
    spare.take_over()
}

const PIPELINE: &str = "
i=0
while true; do i=$((i+1)); echo $i; sleep 0.002; done | cat | while read x; do echo $x; done
";

fn pipeline_goes_on() {
    let mut primary = Primary::start(&["sh", "-c", PIPELINE]);
    let mut next: u64 = primary.line().parse::<u64>().expect("a number") + 1;
    for _ in 0..3 {
        primary = moved(primary, 5);
        let begin: u64 = primary.line().parse().expect("a number");
        assert!(begin >= next, "went back from {next} to {begin}");
        for wanted in begin + 1..begin + 20 {
            assert_eq!(primary.line(), wanted.to_string());
            next = wanted;
        }
    }
}

const ORPHANS: &str = "
import ctypes, os, time
def subreaper(on): ctypes.CDLL(None).prctl(36, on, 0, 0, 0)
class Chain:
    # A child, its child and so on, as many as wanted; each waits to be ended, the last answers.
    def __init__(self, length):
        self.go = [os.pipe() for _ in range(length)]
        self.ask, self.back = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid: return
        for go, _ in self.go:
            if os.fork():
                os.read(go, 1)
                os._exit(7)
        while os.read(self.ask[0], 1):
            os.write(self.back[1], b'%8d' % os.getppid())
    def parent(self):
        os.write(self.ask[1], b'?')
        return int(os.read(self.back[0], 8))
    def end(self, reaped=True):
        # From the last to the first; nobody reaps those in between.
        for _, go in reversed(self.go):
            os.write(go, b'x')
            time.sleep(0.05)
        if reaped: os.waitpid(self.pid, 0)
chains = [Chain(1), Chain(2), Chain(1), Chain(1), Chain(1)]
early, long, zombie, late, last = chains
me = os.getpid()
for chain in chains: chain.parent()
print('ready', flush=True)
time.sleep(0.2)
early.end()
subreaper(1)
long.end()
os.waitpid(-1, 0)
zombie.end(reaped=False)
print('one', flush=True)
time.sleep(0.2)
late.end()
subreaper(0)
last.end()
print('two', flush=True)
time.sleep(0.2)
print([chain.parent() - me for chain in chains], flush=True)
print(os.waitpid(zombie.pid, 0)[1] >> 8, flush=True)
print(os.waitpid(-1, os.WNOHANG), flush=True)
";

/// Who adopts a child whose parent ends depends on who is a subreaper at that moment.
fn orphans() {
    let mut primary = Primary::start(&["python3", "-c", ORPHANS]);
    primary.run_until("ready");
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    for stage in ["one", "two"] {
        primary.run_until(stage);
        spare.apply(primary.checkpoint());
    }
    primary.die();
    let mut taken = spare.take_over();
    let [nobody, mine] = [-1, 0];
    assert_eq!(taken.line(), format!("{:?}", [nobody, mine, mine, mine, nobody]));
    assert_eq!(taken.line(), "7", "the zombie's status");
    assert_eq!(taken.line(), "(0, 0)", "a zombie that the guest has not");
}

const MEMORY: &str = "
import threading, hashlib, time, mmap, os
lock = threading.Lock()
blocks = {}
def work(me):
    n = 0
    while True:
        n += 1
        data = os.urandom(1000 + n % 9000)
        area = mmap.mmap(-1, 1 << 16)
        area[:len(data)] = data
        with lock:
            for key, (digest, length, area_of) in blocks.items():
                if hashlib.md5(area_of[:length]).digest() != digest:
                    print('LOST', key, flush=True)
            blocks[(me, n % 20)] = (hashlib.md5(data).digest(), len(data), area)
            print('ok', flush=True)
        time.sleep(0.001)
for me in range(4):
    threading.Thread(target=work, args=(me,)).start()
";

fn memory_survives() {
    let mut primary = Primary::start(&["python3", "-c", MEMORY]);
    primary.line();
    let mut primary = moved(primary, 50);
    for _ in 0..300 {
        assert_eq!(primary.line(), "ok");
    }
}

fn dropped_ghost_is_gone() {
    let mut primary = Primary::start(&["python3", "-c", COUNTER]);
    primary.run_until("3");
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    let hosts = spare.ghost.host_pids();
    assert_eq!(hosts.len(), 1);
    drop(spare);
    for host in hosts.values() {
        assert!(!std::path::Path::new(&format!("/proc/{host}")).exists());
    }
}

const WAITER: &str = "
import ctypes, os, select, threading, time
libc = ctypes.CDLL(None, use_errno=True)
inner = select.epoll()
events = ctypes.create_string_buffer(12)
def wait():
    got = libc.epoll_wait(inner.fileno(), events, 1, -1)
    print('woken', got, ctypes.get_errno(), flush=True)
threading.Thread(target=wait).start()
r, w = os.pipe()
inner.register(r)
print('waits', flush=True)
time.sleep(0.5)
os.write(w, b'x')
";

fn waits_on() {
    let mut primary = Primary::start(&["python3", "-c", WAITER]);
    primary.run_until("waits");
    primary.run_for(Duration::from_millis(50));
    let mut primary = moved(primary, 10);
    assert_eq!(primary.line(), "woken 1 0");
}

/// Calls that go on where they were interrupted (restart_syscall(2)), here twice, and a signal that
/// nobody minds.
const RESTARTER: &str = "
import ctypes, os, signal, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
r, w = os.pipe()
def polls():
    watched = ctypes.create_string_buffer(struct.pack('ihh', r, 1, 0))
    got = libc.poll(watched, 1, -1)
    print('woken', got, ctypes.get_errno(), flush=True)
def sleeps():
    got = libc.nanosleep(struct.pack('qq', 3, 0), None)
    print('slept', got, ctypes.get_errno(), flush=True)
threads = [threading.Thread(target=each) for each in (polls, sleeps)]
def within(thread, *calls):
    path = f'/proc/self/task/{thread.native_id}/syscall'
    while open(path).read().split()[0] not in calls:
        time.sleep(0.001)
for each in threads:
    each.start()
    # poll, nanosleep, clock_nanosleep
    within(each, '7', '35', '230')
for each, ignored in zip(threads, [signal.SIGWINCH, signal.SIGURG]):
    signal.pthread_kill(each.ident, ignored)
    # restart_syscall
    within(each, '219')
print('waits', flush=True)
threads[1].join()
os.write(w, b'x')
";

fn restarts_twice() {
    let mut primary = Primary::start(&["python3", "-c", RESTARTER]);
    primary.run_until("waits");
    let primary = moved(primary, 10);
    let mut primary = moved(primary, 10);
    assert_eq!(primary.line(), "slept 0 0");
    assert_eq!(primary.line(), "woken 1 0");
}

fn awaited() {
    for _ in 0..10 {
        let primary = Primary::start(&["sleep", "100"]);
        let host = primary.guest.host_pid(GuestPid(2)).expect("is there");
        let program = std::fs::read_link(format!("/proc/{host}/exe")).expect("has a program");
        assert!(!program.ends_with("exe") && program != std::env::current_exe().expect("is known"));
        let open = std::fs::read_dir(format!("/proc/{host}/fd")).expect("has descriptors");
        assert_eq!(open.count(), 3);
    }
}
