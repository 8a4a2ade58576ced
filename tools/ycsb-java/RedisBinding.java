import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.Vector;
import redis.clients.jedis.Jedis;
import redis.clients.jedis.exceptions.JedisException;
import site.ycsb.ByteIterator;
import site.ycsb.DB;
import site.ycsb.DBException;
import site.ycsb.Status;
import site.ycsb.StringByteIterator;

/**
 * The Java core of YCSB on Redis: a record is a hash of its fields, and a sorted set has all keys in
 * the order of their bytes, for scans. One connection for each client; without one the client ends,
 * since a bench that connects anew would hide that a connection broke.
 *
 * <p>Properties: {@code redis.host}, {@code redis.port}.
 */
public final class RedisBinding extends DB {
  private static final String KEYS = "_keys";
  /** Longer than any stall that is measured. */
  private static final int PATIENCE_MS = 60_000;

  private Jedis redis;

  @Override
  public void init() throws DBException {
    String host = getProperties().getProperty("redis.host", "127.0.0.1");
    int port = Integer.parseInt(getProperties().getProperty("redis.port", "6379"));
    redis = new Jedis(host, port, PATIENCE_MS);
    try {
      redis.connect();
    } catch (JedisException error) {
      throw new DBException("connect to Redis at " + host + ":" + port, error);
    }
  }

  @Override
  public void cleanup() {
    redis.close();
  }

  @Override
  public Status read(
      String table, String key, Set<String> fields, Map<String, ByteIterator> result) {
    try {
      return fetch(key, fields, result) ? Status.OK : Status.NOT_FOUND;
    } catch (JedisException error) {
      return failed(error);
    }
  }

  /** Whether there is such a record; what it has goes into {@code result}. */
  private boolean fetch(String key, Set<String> fields, Map<String, ByteIterator> result) {
    if (fields == null) {
      redis.hgetAll(key).forEach((name, value) -> result.put(name, text(value)));
      return !result.isEmpty();
    }
    String[] names = fields.toArray(new String[0]);
    List<String> values = redis.hmget(key, names);
    for (int i = 0; i < names.length; i++) {
      if (values.get(i) != null) {
        result.put(names[i], text(values.get(i)));
      }
    }
    return !result.isEmpty();
  }

  @Override
  public Status scan(
      String table,
      String first,
      int count,
      Set<String> fields,
      Vector<HashMap<String, ByteIterator>> result) {
    try {
      for (String key : redis.zrangeByLex(KEYS, "[" + first, "+", 0, count)) {
        HashMap<String, ByteIterator> record = new HashMap<>();
        if (fetch(key, fields, record)) {
          result.add(record);
        }
      }
      return Status.OK;
    } catch (JedisException error) {
      return failed(error);
    }
  }

  @Override
  public Status update(String table, String key, Map<String, ByteIterator> values) {
    try {
      redis.hset(key, StringByteIterator.getStringMap(values));
      return Status.OK;
    } catch (JedisException error) {
      return failed(error);
    }
  }

  @Override
  public Status insert(String table, String key, Map<String, ByteIterator> values) {
    Status status = update(table, key, values);
    try {
      if (status.isOk()) {
        redis.zadd(KEYS, 0, key);
      }
      return status;
    } catch (JedisException error) {
      return failed(error);
    }
  }

  @Override
  public Status delete(String table, String key) {
    try {
      boolean was = redis.del(key) == 1;
      redis.zrem(KEYS, key);
      return was ? Status.OK : Status.NOT_FOUND;
    } catch (JedisException error) {
      return failed(error);
    }
  }

  private static ByteIterator text(String value) {
    return new StringByteIterator(value);
  }

  private static Status failed(JedisException error) {
    System.err.println("redis: " + error);
    return Status.ERROR;
  }
}
