//! The agent is killed between two steps of the store's code, at each that there is. Nothing in it
//! knows of that: somebody on the way to S3 holds back a request, or the answer to it, and kills.

use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

use hotspare_store::Point;
use hotspare_torture::protected::HANG;
use serde_json::Value;

use super::between::{Act, Request, Side, start};
use super::places::S3;
use super::{BINARY, PATIENT, aws, checker, kill, restore, restored_epoch, scene, settle, stored};

/// Whether this is it; and how many times it is let go by before.
fn is_at(point: Point, request: &Request, side: Side) -> (bool, u32) {
    let name = request.line.split(' ').nth(1).unwrap_or_default();
    let puts = |folder: &str| request.line.starts_with("PUT ") && name.contains(folder);
    let whole = name.ends_with("-whole");
    // Several objects are deleted by one request, which names them in its body.
    let deletes = |folder: &str| {
        let body = String::from_utf8_lossy(&request.bytes);
        request.line.starts_with("POST ") && body.contains(folder)
    };
    let is_done = side == Side::Done;
    match point {
        Point::Claimed => (is_done && puts("/reigns/"), 0),
        Point::Pack => (is_done && puts("/packs/") && name.contains("-i-"), 2),
        Point::Packs => (!is_done && puts("/checkpoints/") && !whole, 2),
        Point::Stored => (is_done && puts("/checkpoints/") && !whole, 2),
        // The first whole one is what all others stand on.
        Point::Folded => (is_done && puts("/checkpoints/") && whole, 1),
        Point::Forgotten => (is_done && deletes("/checkpoints/"), 0),
        Point::PackDeleted => (is_done && deletes("/packs/"), 0),
    }
}

/// Holds the agent at its point, and tells that it does.
fn hold_at(point: Point, held: Sender<()>) -> impl Fn(&Request, Side) -> Act {
    let seen = Mutex::new(Some(0));
    move |request, side| {
        let mut seen = seen.lock().unwrap();
        let Some(count) = &mut *seen else { return Act::Pass };
        let (is_it, before) = is_at(point, request, side);
        *count += u32::from(is_it);
        if !is_it || *count <= before {
            return Act::Pass;
        }
        *seen = None;
        let _ = held.send(());
        Act::Hold
    }
}

/// Every 200 ms, little is kept, so that chains are folded and deleted within seconds.
const BRIEFLY: [&str; 6] = ["--store-every", "200ms", "--keep", "1s", "--keep-last", "2"];

#[test]
fn wherever_an_agent_dies_while_it_stores_the_newest_checkpoint_comes_back_as_it_was() {
    let scene = scene(2, "", &[]);
    let s3 = S3::start(scene.host(1));
    for point in Point::ALL {
        let place = format!("terms/{}", point.name());
        let direct = s3.place(&place);
        let host = scene.host(0);
        let (holds, is_held) = channel();
        let port = start(host, s3.socket(), hold_at(point, holds));
        let through = format!("s3://{place}/hs?endpoint=http://127.0.0.1:{port}&region=us-east-1");
        let mut command = Command::new(BINARY);
        aws(&mut command);
        command.args(["run", "--json", "--insecure", "--epoch", "50ms", "--guest", "checker"]);
        command.args(["--store", &through]).args(BRIEFLY).args(PATIENT);
        let primary =
            host.spawn(command.args(["--", "python3", "-c", &checker(8, 0.001)])).unwrap();
        let held = is_held.recv_timeout(HANG);
        assert!(held.is_ok(), "{point:?} is not reached:\n{}", primary.said());
        kill(&primary);

        let newest = stored(host, &direct).into_iter().next_back();
        let words = ["--store", &direct, &direct, "checker"];
        let again = restore(&scene, 0, &[&BRIEFLY[..], &words].concat());
        let Some(newest) = newest else {
            assert_eq!(point, Point::Claimed, "something was stored");
            let _ = again.wait(HANG);
            assert!(again.said().contains("no checkpoint"), "{}", again.said());
            continue;
        };
        assert_eq!(restored_epoch(&again), newest["epoch"], "{point:?}");
        let mut rounds = 0;
        let looked = again.stdout().find(HANG, |line| {
            assert!(!line.text.contains("WRONG"), "{point:?}, epoch {newest}: {}", line.text);
            rounds += usize::from(line.text.contains("fine"));
            (rounds >= 3).then_some(())
        });
        assert!(looked.is_some(), "it does not go on:\n{}", again.said());
        // The next writer goes on from whatever is there.
        let next: Value = settle(&scene, 0, &direct, &again);
        assert!(next["reign"].as_u64() > newest["reign"].as_u64(), "{next} after {newest}");
        let mut inspect = Command::new(BINARY);
        aws(&mut inspect);
        let inspect = inspect.args(["inspect", "--verify", &direct, "checker"]);
        let shown = host.run(inspect, HANG).unwrap();
        assert!(shown.contains("is as it was written"), "{shown}");
        kill(&again);
    }
}
