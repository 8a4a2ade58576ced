//! The bench measures something when nothing is protected.

use std::time::Duration;

use hotspare_torture::bench::{PauseBench, pause};

#[test]
fn an_unprotected_redis_serves_as_fast_as_it_can() {
    let bench = PauseBench {
        hotspare: None,
        more: vec![],
        keys: 1000,
        writes: 0.5,
        rate_per_s: None,
        epoch: Duration::from_millis(100),
        length: Duration::from_millis(300),
    };
    let result = pause(&bench).unwrap();
    println!("{result:?}");
    assert!(result.replies_per_s > 0.0 && result.latency_ms.max > 0.0);
    assert!(result.epochs.is_empty());
}
