//! Touch sets: what is predicted, and what restarts make of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_image::Checkpoint;
use hotspare_image::memory::{Backing, PAGE_BYTES, PageOwner};
use hotspare_image::touch::TouchSet;
use hotspare_kernel::accessed::PageTables;
use hotspare_process::capture::touch::Touches;
use hotspare_process::lazy::{Plan, Start, Window};
use hotspare_process::pages::PageRun;

use super::late::{line, load};
use super::world::{Primary, Spare};

/// What tracking cost.
#[derive(Debug, Default)]
pub struct Cost {
    pub clear: Duration,
    pub pause: Duration,
    pub looks: Vec<Duration>,
    pub window: Duration,
}

/// A checkpoint, and what the program touched in the window after it.
pub fn tracked(
    primary: &mut Primary,
    window: &Window,
) -> ((Checkpoint, Vec<PageRun>), TouchSet, Cost) {
    let mut cost = Cost::default();
    let tables = PageTables::open().expect("opens page tables");
    let mut early = primary.checkpoint().1;
    early.extend(primary.checkpoint().1);
    let began = Instant::now();
    primary.guest.forget_touches().expect("clears");
    cost.clear = began.elapsed();
    let captured = loop {
        // With nothing in between that the guest could run for.
        match primary.try_checkpoint() {
            Ok(Some(captured)) => break captured,
            Ok(None) | Err(_) => primary.run_for(Duration::from_millis(1)),
        }
    };
    let mut checkpoint = captured.checkpoint;
    early.extend(captured.runs);
    cost.pause = captured.parts.total;
    // As one full checkpoint.
    checkpoint.spaces.iter_mut().for_each(|space| space.reset = true);
    let mut touches: Touches = primary.guest.begin_touches(tables).expect("begins");
    let began = Instant::now();
    while !touches.is_over(window) {
        let due = touches.next_look().min(Instant::now() + Duration::from_millis(100));
        primary.run_for(due.saturating_duration_since(Instant::now()));
        if touches.next_look() <= Instant::now() {
            cost.looks.push(touches.look().expect("looks"));
        }
    }
    cost.looks.push(touches.look().expect("looks"));
    cost.window = began.elapsed();
    ((checkpoint, early), touches.end().0, cost)
}

const TOUCHES_SOME: &str = "
import mmap, time
PAGES = 16384
area = mmap.mmap(-1, PAGES * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for n in range(PAGES):
    area[n * 4096] = 1 + n % 200
print('ready', flush=True)
i = 0
while True:
    i += 1
    for n in range(0, PAGES, 7):
        if area[n * 4096] != 1 + n % 200:
            print('LOST', flush=True)
        if n % 3 == 0:
            area[n * 4096 + 1] = i % 256
    print('ok', flush=True)
    time.sleep(0.01)
";

/// Reads are seen, and nothing else in an area of which every seventh page is touched; a restart
/// with that touch set waits for nothing.
pub fn what_is_read_is_in_the_touch_set() {
    let mut primary = Primary::start(&["python3", "-c", TOUCHES_SOME]);
    primary.run_until("ready");
    primary.run_until("ok");
    primary.run_until("ok");
    let window = Window { bytes_per_second: 64 << 20, ..Window::default() };
    let (first, touched, cost) = tracked(&mut primary, &window);
    println!("{} pages, {cost:?}", touched.pages());
    let area = area_of(&first.0, 16384 * PAGE_BYTES);
    let all = touched.groups.iter().flat_map(|group| &group.spans);
    let pages = all.flat_map(|span| (span.start..span.end()).step_by(PAGE_BYTES as usize));
    let seen: BTreeSet<u64> =
        pages.filter(|at| *at >= area && *at < area + (16384 << 12)).collect();
    let wanted: BTreeSet<u64> = (0..16384).step_by(7).map(|n: u64| area + n * PAGE_BYTES).collect();
    let (missing, more) = (wanted.difference(&seen).count(), seen.difference(&wanted).count());
    assert_eq!((missing, more), (0, 0), "of {} pages", wanted.len());
    primary.die();
    let stored = line(&first, 32);
    let plan = Plan::new(&touched, Start::Touched, &stored);
    let spare = Spare::start(&first.0);
    let (mut primary, loading) = spare.restart_late(first.0, Arc::new(stored), &plan);
    let left = loading.progress.bytes_left();
    assert!(left > 16384 * PAGE_BYTES * 5 / 7, "{left} bytes come late");
    primary.run_until("ok");
    assert!(!loading.progress.is_done());
    let loaded = load(&mut primary, loading);
    let in_area = |start: u64| start >= area && start < area + (16384 << 12);
    let missed = loaded.missed.iter().filter(|span| in_area(span.start)).count();
    assert_eq!(missed, 0, "{loaded:?}");
    assert_eq!(primary.line(), "ok");
}

/// Where the mapping of so many bytes begins.
pub fn area_of(checkpoint: &Checkpoint, bytes: u64) -> u64 {
    let mappings = checkpoint.spaces.iter().flat_map(|space| &space.mappings);
    let is_area = |mapping: &&hotspare_image::memory::Mapping| {
        mapping.backing == Backing::Anonymous && mapping.range.bytes() >= bytes
    };
    let found: Vec<_> = mappings.filter(is_area).collect();
    let [area] = found[..] else { panic!("{} areas", found.len()) };
    // Neighbours lie below: the kernel maps downwards.
    area.range.start.0
}

/// By hand: `bench NAME RATE-MB/S ROUND-TRIP-MS WARM-SECONDS COMMAND…` prints a line of the table.
pub fn bench(arguments: &[String]) {
    let number = |index: usize| arguments[index].parse::<u64>().expect("a number");
    let (rate, delay, warm) = (number(1) << 20, Duration::from_millis(number(2)), number(3));
    let command: Vec<&str> = arguments[4..].iter().map(String::as_str).collect();
    let mut primary = Primary::start_in(&command, Some("/tmp"));
    primary.run_for(Duration::from_secs(warm));
    let window = Window { bytes_per_second: rate, most: Duration::from_secs(20) };
    let (first, touched, cost) = tracked(&mut primary, &window);
    primary.die();
    let mut stored = line(&first, 0);
    (stored.bytes_per_second, stored.delay) = (rate, delay);
    let stored = Arc::new(stored);
    let bytes =
        hotspare_image::source::PageSource::all(&*stored).iter().map(|s| s.pages).sum::<u64>();
    let all = Plan { first: hotspare_image::source::PageSource::all(&*stored), ..Plan::default() };
    let full = restart(&first.0, &stored, &all);
    let [whole, smooth, early] = [Start::Touched, Start::Smooth, Start::Early]
        .map(|start| restart(&first.0, &stored, &Plan::new(&touched, start, &*stored)));
    let mib = |pages: u64| pages as f64 / 256.0;
    let looks: Duration = cost.looks.iter().sum();
    let has = |start: u64, owner: PageOwner| {
        let all = touched.groups.iter().flat_map(|group| &group.spans);
        all.into_iter().any(|s| s.owner == owner && s.start <= start && start < s.end())
    };
    let unforeseen = whole.1.missed.iter().filter(|s| !has(s.start, s.owner)).count();
    println!(
        "| {} | {:.1} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} % | {:.2} | {} | \
         {:.2} | {:.1} |",
        arguments[0],
        mib(bytes),
        mib(touched.pages()),
        cost.window.as_secs_f64(),
        full.0.as_secs_f64(),
        whole.0.as_secs_f64(),
        smooth.0.as_secs_f64(),
        early.0.as_secs_f64(),
        100.0 - 100.0 * early.0.as_secs_f64() / full.0.as_secs_f64(),
        early.1.took.as_secs_f64(),
        unforeseen,
        early.1.waited.as_secs_f64(),
        (cost.clear + looks).as_secs_f64() * 1e3,
    );
}

/// Until the guest runs, and how the load went.
fn restart(
    checkpoint: &Checkpoint,
    stored: &Arc<super::stored::Stored>,
    plan: &Plan,
) -> (Duration, hotspare_process::lazy::Loaded) {
    let began = Instant::now();
    let spare = Spare::start_in(checkpoint, Some("/tmp"));
    let (mut primary, loading) = spare.restart_late(checkpoint.clone(), stored.clone(), plan);
    let latency = began.elapsed();
    let loaded = load(&mut primary, loading);
    primary.die();
    (latency, loaded)
}
