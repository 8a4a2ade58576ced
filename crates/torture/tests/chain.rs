//! A Redis changes hosts, planned and not, and spares come and go.

use std::time::Duration;

use hotspare_torture::chain::{
    Scene, await_ready, descendants, protected_times, says, settle, signal_redis, takeovers,
};
use hotspare_torture::lab::{Line, Process};
use hotspare_torture::programs::{Change, by_name, run_with_change};
use hotspare_torture::protected::{Engine, HANG, STREAM_PORT};
use nix::sys::signal::Signal;

const EPOCH: Duration = Duration::from_millis(50);

/// The one of these spares that has taken over.
fn heir<'a>(spares: &[&'a Process]) -> &'a Process {
    let deadline = hotspare_torture::clock::Instant::now() + HANG;
    loop {
        let heirs: Vec<&Process> =
            spares.iter().copied().filter(|spare| takeovers(spare) > 0).collect();
        if let Some(heir) = heirs.first() {
            return heir;
        }
        let words: Vec<String> = spares.iter().map(|spare| spare.said()).collect();
        assert!(hotspare_torture::clock::Instant::now() < deadline, "no heir:\n{words:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Two spares, two deaths: `spares` are on hosts 1 and 2, the Redis on host 0.
fn two_deaths(scene: &Scene, primary: &Process, spares: [&Process; 2]) {
    protected_times(primary, 1);
    // Both must be ready, or the second has nothing to inherit.
    await_ready(scene, primary, 2);
    scene.set("first", "1");
    settle(primary);
    scene.host(0).kill().unwrap();
    let one = heir(&spares);
    let other = spares.into_iter().find(|spare| spare.pid() != one.pid()).unwrap();
    assert_eq!(scene.get("first").as_deref(), Some("1"));
    protected_times(one, 1);
    assert_eq!(takeovers(other), 0, "both took over:\n{}\n{}", one.said(), other.said());
    scene.set("second", "2");
    settle(one);
    let host = usize::from(one.pid() != spares[0].pid()) + 1;
    scene.host(host).kill().unwrap();
    let (failover, _) = Engine::taken_over(other).unwrap();
    assert!(failover.term >= 3, "{failover:?}");
    assert_eq!(scene.get("first").as_deref(), Some("1"));
    assert_eq!(scene.get("second").as_deref(), Some("2"));
    assert_eq!(takeovers(other), 1);
    assert_eq!(takeovers(one), 1);
}

/// What a primary says of a spare that had pages of its first checkpoint: how many, of how many.
fn pages_kept(primary: &Process) -> (u64, u64) {
    says(primary, "pages from before");
    let said = primary.said();
    let line = said.lines().find(|line| line.contains("pages from before")).expect("a line");
    let numbers = line.split(' ').filter_map(|word| word.parse().ok()).collect::<Vec<u64>>();
    let [.., kept, all] = numbers[..] else { panic!("{line}") };
    (kept, all)
}

/// Thirty megabytes of which no page is like another.
fn fill(scene: &Scene) {
    for key in 0..60 {
        scene.set(&format!("big{key}"), &value(key));
    }
}

fn value(key: u64) -> String {
    (1..25_001).map(|at| format!("{:020x}", (key << 32 | at) * at)).collect()
}

#[test]
fn two_spares_survive_two_deaths_and_who_follows_is_not_sent_what_it_has() {
    let scene = Scene::new(3, EPOCH);
    let one = scene.engine.spare(scene.host(1)).unwrap();
    let two = scene.engine.spare(scene.host(2)).unwrap();
    let primary = scene.run(&[1, 2]);
    fill(&scene);
    two_deaths(&scene, &primary, [&one, &two]);
    // The last heir has no spare, and the first primary's had nothing yet.
    let says = [&one, &two].map(|process| process.said().contains("pages from before"));
    assert!(says[0] != says[1] && !primary.said().contains("pages from before"), "{says:?}");
    let first = if says[0] { &one } else { &two };
    let (kept, all) = pages_kept(first);
    println!("{kept} of {all} pages were kept");
    assert!(all > 7000 && kept > all / 10 * 9, "{kept} of {all}:\n{}", first.said());
    for key in 0..60 {
        assert_eq!(scene.get(&format!("big{key}")).as_deref(), Some(&*value(key)), "{key}");
    }
}

/// The primary lives on, and the spare comes back with the ghost it had.
#[test]
fn a_spare_that_was_cut_off_is_not_sent_what_it_has() {
    let scene = Scene::new(2, EPOCH);
    let spare = scene.engine.spare(scene.host(1)).unwrap();
    let primary = scene.run(&[1]);
    protected_times(&primary, 1);
    fill(&scene);
    settle(&primary);
    // The primary hears nothing of it and drops it; the spare hears the primary.
    scene.lab.cut(scene.host(1), scene.host(0)).unwrap();
    let told = |line: &Line| line.text.contains("\"unprotected\"").then_some(());
    assert!(primary.stdout().find(HANG, told).is_some(), "{}", primary.said());
    scene.set("meanwhile", "1");
    scene.lab.heal().unwrap();
    protected_times(&primary, 2);
    let (kept, all) = pages_kept(&primary);
    println!("{kept} of {all} pages were kept");
    assert!(all > 7000 && kept > all / 10 * 9, "{kept} of {all}:\n{}", primary.said());
    settle(&primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    assert_eq!(scene.get("meanwhile").as_deref(), Some("1"));
    assert_eq!(scene.get("big7").as_deref(), Some(&*value(7)));
}

#[test]
fn spares_that_only_dial_survive_two_deaths() {
    let mut scene = Scene::new(3, EPOCH);
    let listens = scene.host(0).socket(STREAM_PORT);
    scene.engine.more = vec!["--listen".to_owned(), listens.to_string()];
    let primary = scene.run(&[]);
    let one = scene.joining_spare(1, listens);
    let two = scene.joining_spare(2, listens);
    two_deaths(&scene, &primary, [&one, &two]);
}

#[test]
fn a_spare_that_joins_leaves_the_other_as_it_is() {
    for dies in [1, 2] {
        let mut scene = Scene::new(3, EPOCH);
        let listens = scene.host(0).socket(STREAM_PORT);
        scene.engine.more = vec!["--listen".to_owned(), listens.to_string()];
        let one = scene.engine.spare(scene.host(1)).unwrap();
        let primary = scene.run(&[1]);
        scene.set("early", "1");
        await_ready(&scene, &primary, 1);
        let ghost = descendants(one.pid(), "redis-server");
        assert_eq!(ghost.len(), 1);

        let two = scene.joining_spare(2, listens);
        await_ready(&scene, &primary, 2);
        scene.set("late", "2");
        settle(&primary);
        assert_eq!(descendants(one.pid(), "redis-server"), ghost, "its ghost was built anew");
        let unprotected = |line: &Line| line.text.contains("\"unprotected\"");
        assert!(!primary.stdout().lines().iter().any(unprotected), "{}", primary.said());

        // Either of them has everything.
        scene.host(dies).kill().unwrap();
        await_ready(&scene, &primary, 1);
        scene.host(0).kill().unwrap();
        let heir = if dies == 1 { &two } else { &one };
        Engine::taken_over(heir).unwrap();
        assert_eq!(scene.get("early").as_deref(), Some("1"));
        assert_eq!(scene.get("late").as_deref(), Some("2"));
    }
}

#[test]
fn a_spare_that_lost_its_ghost_says_so_and_begins_anew() {
    let scene = Scene::new(2, EPOCH);
    let spare = scene.engine.spare(scene.host(1)).unwrap();
    let primary = scene.run(&[1]);
    protected_times(&primary, 1);
    signal_redis(&spare, Signal::SIGKILL);
    says(&spare, "the ghost is lost, a new one is wanted");
    says(&primary, "the spare leaves: its ghost is lost");
    protected_times(&primary, 2);
    scene.set("kept", "yes");
    settle(&primary);
    scene.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    assert_eq!(scene.get("kept").as_deref(), Some("yes"));
}

#[test]
fn a_switchover_that_comes_to_nothing_leaves_the_guest_where_it_is() {
    let scene = Scene::new(2, EPOCH);
    let primary = scene.run(&[]);
    let why = scene.hotspare(0, &["switchover"]).expect_err("there is no spare");
    assert!(why.contains("no spare is connected"), "{why}");
    drop(primary);
    scene.host(0).boot().unwrap();

    // Checkpoints are so far apart that the loss of the ghost shows at the last one only.
    let mut scene = scene;
    scene.engine.epoch = Duration::from_secs(3600);
    let spare = scene.engine.spare(scene.host(1)).unwrap();
    let primary = scene.run(&[1]);
    protected_times(&primary, 1);
    scene.set("kept", "yes");
    signal_redis(&spare, Signal::SIGKILL);
    let why = scene.hotspare(0, &["switchover"]).expect_err("the ghost is dead");
    assert!(why.contains("the guest runs on this host"), "{why}");
    assert_eq!(takeovers(&spare), 0);
    assert_eq!(scene.get("kept").as_deref(), Some("yes"));
    // The spare comes back by itself, and the next one succeeds.
    protected_times(&primary, 2);
    let moved = scene.hotspare(0, &["switchover"]).expect("moved");
    assert!(moved.contains("the guest stood still for"), "{moved}");
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(0), "{}", primary.said());
    assert_eq!(scene.get("kept").as_deref(), Some("yes"));
    assert_eq!(takeovers(&spare), 1);
}

#[test]
fn a_redis_under_load_moves_without_a_loss() {
    let redis = by_name("redis-server").expect("a program of the list");
    let binary = Engine::built().expect("build the program first");
    for seed in 1..=3 {
        let run = run_with_change(&redis, seed, binary.clone(), EPOCH, Change::Planned).unwrap();
        println!("{run}");
        assert!(run.is_good(), "{run}");
    }
}

#[test]
fn the_hook_is_told_on_both_hosts() {
    let mut scene = Scene::new(2, EPOCH);
    let hook = "env | grep -E '^HOTSPARE_(EVENT|TERM|ADDRESS|GUEST|INTERFACE)=' | sort \
                > /srv/hotspare-lab/hook";
    scene.engine.more = vec!["--takeover-hook".to_owned(), hook.to_owned()];
    scene.engine.more.extend(["--guest".to_owned(), "shop".to_owned()]);
    let spare = scene.engine.spare_with(scene.host(1), &["--takeover-hook", hook]).unwrap();
    let primary = scene.run(&[1]);
    protected_times(&primary, 1);
    scene.hotspare(0, &["switchover"]).expect("moved");
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(0));
    Engine::taken_over(&spare).unwrap();
    for (host, event, term) in [(0, "release", 1), (1, "takeover", 2)] {
        let path = scene.host(host).outside("/srv/hotspare-lab/hook");
        let wanted = format!(
            "HOTSPARE_ADDRESS=10.77.0.50\nHOTSPARE_EVENT={event}\nHOTSPARE_GUEST=shop\n\
             HOTSPARE_INTERFACE=\nHOTSPARE_TERM={term}\n"
        );
        let deadline = hotspare_torture::clock::Instant::now() + HANG;
        loop {
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            if found == wanted {
                break;
            }
            let late = hotspare_torture::clock::Instant::now() > deadline;
            assert!(!late, "{found}\ninstead of\n{wanted}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_primary_that_was_cut_off_stops_its_guest_when_the_link_heals() {
    let scene = Scene::new(2, EPOCH);
    let spare = scene.engine.spare(scene.host(1)).unwrap();
    let primary = scene.run(&[1]);
    protected_times(&primary, 1);
    scene.set("before", "the cut");
    settle(&primary);
    for (from, to) in [(0, 1), (1, 0)] {
        scene.lab.cut(scene.host(from), scene.host(to)).unwrap();
    }
    Engine::taken_over(&spare).unwrap();
    let told = |line: &Line| line.text.contains("\"unprotected\"").then_some(());
    assert!(primary.stdout().find(HANG, told).is_some(), "{}", primary.said());
    assert!(primary.try_wait().is_none(), "both run: the price of having no arbiter");
    assert_eq!(descendants(primary.pid(), "redis-server").len(), 1);
    scene.lab.heal().unwrap();
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(75), "{}", primary.said());
    says(&primary, "another host has taken over (term 2)");
    // The kernel takes the killed processes away in its own time.
    let deadline = hotspare_torture::clock::Instant::now() + HANG;
    while scene.host(0).is_alive().unwrap() {
        assert!(hotspare_torture::clock::Instant::now() < deadline, "some of it is left");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(scene.get("before").as_deref(), Some("the cut"));
    assert!(spare.try_wait().is_none());
}

#[test]
fn an_end_after_a_takeover_is_told() {
    for (signal, status, words) in [
        (Signal::SIGSEGV, 139, "the guest was ended by SIGSEGV"),
        (Signal::SIGKILL, 137, "THE GUEST IS LOST"),
    ] {
        let scene = Scene::new(2, EPOCH);
        let spare = scene.engine.spare(scene.host(1)).unwrap();
        let primary = scene.run(&[1]);
        protected_times(&primary, 1);
        scene.host(0).kill().unwrap();
        Engine::taken_over(&spare).unwrap();
        signal_redis(&spare, signal);
        assert_eq!(spare.wait(HANG).unwrap().code(), Some(status), "{}", spare.said());
        says(&spare, words);
        assert_eq!(Engine::guest_ended(&spare, HANG).unwrap(), status);
    }
}
