// Stands in for rclcpp, with its names and signatures, as far as the example needs them. Parameters come from ``-p name:=value``;
// spinning delivers images of 1, 2, 3, ... in rows that are longer than the image is wide; what is published is printed.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <sensor_msgs/msg/image.hpp>
#include <std_msgs/msg/float32_multi_array.hpp>
#include <string>
#include <type_traits>

namespace rclcpp {

inline std::map<std::string, std::string> &parameters() {
    static std::map<std::string, std::string> given;
    return given;
}

inline std::function<void(sensor_msgs::msg::Image::SharedPtr)> &subscriber() {
    static std::function<void(sensor_msgs::msg::Image::SharedPtr)> callback;
    return callback;
}

struct Logger {};

inline Logger get_logger(const std::string &) { return {}; }

inline void init(int count, char **arguments) {
    for (int i = 1; i < count; i++) {
        const std::string argument = arguments[i];
        const auto at = argument.find(":=");
        if (at != std::string::npos)
            parameters()[argument.substr(0, at)] = argument.substr(at + 2);
    }
}

inline void shutdown() {}

template <typename Message> class Publisher {
public:
    using SharedPtr = std::shared_ptr<Publisher>;
    void publish(const Message &message) const {
        for (const float each : message.data)
            std::printf("%g ", static_cast<double>(each));
        std::printf("\n");
        std::fflush(stdout);
    }
};

template <typename Message> class Subscription {
public:
    using SharedPtr = std::shared_ptr<Subscription>;
};

class Node {
public:
    explicit Node(const std::string &) {}
    virtual ~Node() = default;

    template <typename T> T declare_parameter(const std::string &name, const T &otherwise) {
        const auto found = parameters().find(name);
        if (found == parameters().end())
            return otherwise;
        if constexpr (std::is_same_v<T, std::string>)
            return found->second;
        else
            return static_cast<T>(std::stoll(found->second));
    }

    template <typename Message> typename Publisher<Message>::SharedPtr create_publisher(const std::string &, int) {
        return std::make_shared<Publisher<Message>>();
    }

    template <typename Message, typename Callback>
    typename Subscription<Message>::SharedPtr create_subscription(const std::string &, int, Callback callback) {
        subscriber() = callback;
        return std::make_shared<Subscription<Message>>();
    }

    Logger get_logger() const { return {}; }
};

inline void spin(const std::shared_ptr<Node> &) {
    const int height = std::atoi(parameters()["height"].c_str()), width = std::atoi(parameters()["width"].c_str());
    for (int number = 1; number <= std::atoi(parameters()["images"].c_str()); number++) {
        auto image = std::make_shared<sensor_msgs::msg::Image>();
        image->height = static_cast<uint32_t>(height);
        image->width = static_cast<uint32_t>(width);
        image->step = static_cast<uint32_t>(width * 3 + 5);
        image->encoding = number == 3 ? "mono8" : "rgb8";
        image->data.assign(static_cast<size_t>(height) * image->step, 255);
        for (int y = 0; y < height; y++)
            for (int x = 0; x < width * 3; x++)
                image->data[static_cast<size_t>(y) * image->step + static_cast<size_t>(x)] = static_cast<uint8_t>(number);
        subscriber()(image);
    }
}

inline void print(const char *level, const char *form, ...) {
    std::va_list arguments;
    va_start(arguments, form);
    std::fprintf(stderr, "%s ", level);
    std::vfprintf(stderr, form, arguments);
    std::fprintf(stderr, "\n");
    va_end(arguments);
}

} // namespace rclcpp

#define RCLCPP_WARN(logger, ...) ((void)(logger), rclcpp::print("warn", __VA_ARGS__))
#define RCLCPP_ERROR(logger, ...) ((void)(logger), rclcpp::print("error", __VA_ARGS__))
